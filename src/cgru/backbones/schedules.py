"""Noise schedules of model folders: read as DDIM for UNets, whatever sampler they name, and flow matching for SD3."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from cgru.backbones.base import one_line
from cgru.mdp.flow import FlowKernel, flow_kernel
from cgru.mdp.kernel import DDIMKernel, ddim_kernel

logger = logging.getLogger(__name__)

OTHER_FLOW = ("use_dynamic_shifting", "invert_sigmas", "stochastic_sampling", "shift_terminal")
"""Settings of flow schedules that Stable Diffusion 3 does not use; our kernel does not support them."""


def ddim_scheduler(config: Mapping[str, Any], *, offset: int | None = 1) -> DDIMScheduler:
    """Read any Stable Diffusion scheduler config as DDIM.

    Clipping or thresholding x̂0 is for pixel models; our kernel does neither, so a config that asks for it is an error.
    A config without that setting (Euler, DPM) means no clipping, although DDIM's own default is to clip. For SD 1.x and
    2.x the steps offset is 1, because diffusers' StableDiffusionPipeline always sets it, so that both give the same
    pictures; for others (`offset` None) it is the file's.
    """
    _check_table(config)
    for setting in ("clip_sample", "thresholding"):
        if config.get(setting):
            raise ValueError(
                f"the scheduler config has {setting} = true, which is for pixel models; "
                f"set {setting} to false in scheduler/scheduler_config.json"
            )
    if (
        offset is not None
        and config.get("steps_offset", offset) != offset
        and config.get("timestep_spacing", "leading") == "leading"
    ):
        logger.warning("scheduler steps_offset %s read as 1, as diffusers does", config["steps_offset"])
    try:
        fixed = {} if offset is None else {"steps_offset": offset}
        scheduler = DDIMScheduler.from_config({**config, "clip_sample": False, **fixed})
        scheduler.set_timesteps(1)  # an unknown timestep_spacing shows only now
    except (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # beta_schedule: NotImplementedError
        raise ValueError(
            f"the scheduler config is not one of Stable Diffusion ({one_line(error)}); "
            "correct scheduler/scheduler_config.json"
        ) from error
    return scheduler


def flow_scheduler(config: Mapping[str, Any]) -> FlowMatchEulerDiscreteScheduler:
    """Read a scheduler config as flow matching with one shift for all sizes, as Stable Diffusion 3 has it."""
    _check_table(config)
    kind = str(config.get("_class_name"))
    if not kind.startswith("FlowMatch"):
        raise ValueError(
            f"the scheduler is a {kind}; Stable Diffusion 3 has a FlowMatchEulerDiscreteScheduler. Correct "
            "scheduler/scheduler_config.json"
        )
    for setting in OTHER_FLOW:
        if config.get(setting):
            raise ValueError(
                f"the scheduler config has {setting} = {config[setting]}, which Stable Diffusion 3 does not have; "
                f"remove {setting} from scheduler/scheduler_config.json"
            )
    try:
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(1)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"the scheduler config is not one of Stable Diffusion 3 ({one_line(error)}); correct "
            "scheduler/scheduler_config.json"
        ) from error
    return scheduler


def flow(
    scheduler: FlowMatchEulerDiscreteScheduler,
    name: str,
    steps: int,
    *,
    eta: float,
    noisy_steps: int | None,
    device: torch.device,
) -> FlowKernel:
    """Return the SDE of flow matching over a model's schedule; with eta 0 it is diffusers' Euler."""
    most = scheduler.config.num_train_timesteps
    if not 1 <= steps <= most:
        raise ValueError(f"{steps} denoising steps; {name} allows 1 to {most}")
    schedule = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    schedule.set_timesteps(steps)
    return flow_kernel(schedule.sigmas, schedule.timesteps, eta=eta, noisy_steps=noisy_steps).to(device)


def ddim(
    scheduler: DDIMScheduler, name: str, steps: int, *, eta: float, noisy_steps: int | None, device: torch.device
) -> DDIMKernel:
    """Return DDIM over a model's schedule."""
    most = max_steps(scheduler)
    if not 1 <= steps <= most:
        raise ValueError(f"{steps} denoising steps; {name} allows 1 to {most}")
    return ddim_kernel(
        scheduler.alphas_cumprod,
        _timesteps(scheduler, steps),
        final_alpha=float(scheduler.final_alpha_cumprod),
        eta=eta,
        prediction_type=scheduler.config.prediction_type,
        noisy_steps=noisy_steps,
    ).to(device)


def max_steps(scheduler: DDIMScheduler) -> int:
    """The most denoising steps whose times the model was trained on: 999 of 1000 if they start at time 1."""
    times = scheduler.config.num_train_timesteps
    return next((steps for steps in range(times, 0, -1) if int(_timesteps(scheduler, steps).max()) < times), 0)


def _check_table(config: object) -> None:
    if not isinstance(config, Mapping):
        raise ValueError(
            f"scheduler/scheduler_config.json is {config!r}; it must be a table of settings. Save it again."
        )


def _timesteps(scheduler: DDIMScheduler, steps: int) -> Tensor:
    schedule = DDIMScheduler.from_config(scheduler.config)
    schedule.set_timesteps(steps)
    times: Tensor = schedule.timesteps[:steps]  # "trailing" lists one too many, time -1, for some counts (61, 103)
    return times
