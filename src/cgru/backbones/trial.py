"""A user's own model, tried before anything is written: the parts it lacks, and what its methods return wrongly.

Each method is called once or twice, for two latents, as a run would call it, since a run would stop on a mistake hours
later or learn from wrong numbers. The cost is about one training step. What is not tried: noise (eta above 0),
gradients through `decode`, and optional parts beside `classes` and `text_encoders`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cgru.backbones.base import HasClasses, classes_of, networks_of, one_line, unwrapped
from cgru.catalog import place_of
from cgru.mdp.kernel import Gaussian, ReverseKernel
from cgru.mdp.trajectory import Conditioning

PARTS: dict[str, type] = {
    "name": str,
    "latent_shape": tuple,
    "denoiser": nn.Module,
    "decoder": nn.Module,
    "device": torch.device,
    "dtype": torch.dtype,
}
"""What a backbone has beside its methods."""
METHODS = ("encode_text", "predict", "kernel", "decode", "encode")
LATENTS = 2
"""How many are tried at once: with one, a method that ignores the batch would pass."""


class Fault(Exception):
    """What is wrong with a model, as a phrase that follows its name."""


def lacking(model: object) -> str | None:
    """Why an object is not a `Backbone`, as a phrase that follows its name; None if it is one."""
    kinds: dict[str, Any] = {**PARTS, **dict.fromkeys(METHODS, Callable)}
    for name, kind in kinds.items():
        if not hasattr(model, name):  # not isinstance: it does not look into an nn.Module's own modules
            return f"without {name!r}"
        if not isinstance(part := getattr(model, name), kind):
            return f"whose {name!r} is a {type(part).__name__}, not a {kind.__name__}"
        if name == "latent_shape" and not (part and all(isinstance(n, int) and n > 0 for n in part)):
            return f"whose 'latent_shape' is {part}, not numbers of at least 1"
    return None


def failing(model: Any) -> str | None:  # noqa: ANN401 - what `lacking` has let pass
    """What a model returns wrongly, as a phrase that follows its name; None if all is correct.

    The networks are frozen and left so. No gradient stays behind, and torch's random state is as it was.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            _freeze(model)
            _try_methods(model)
    except Fault as fault:
        return str(fault)
    return None


def _freeze(model: Any) -> None:  # noqa: ANN401
    # before the trial, in which dropout would draw and BatchNorm would change its statistics
    with _tried("text_encoders", "networks by name"):
        networks = networks_of(model)
        for network in (*networks.values(), model.decoder):
            network.requires_grad_(False).eval()


def _try_methods(model: Any) -> None:  # noqa: ANN401
    condition, kernel = _condition(model), _kernel(model)
    drawn = torch.randn((LATENTS, *model.latent_shape), generator=torch.Generator().manual_seed(0))
    x, time = drawn.to(model.device), kernel.timesteps[:1].to(model.device).expand(LATENTS)
    for guidance in (2.0, 1.0) if condition.unconditional else (1.0,):
        prediction = _prediction(model, x, time, condition, guidance)
    _try_step(kernel, prediction, x)
    _try_backward(model, x[:1], time[:1], condition[:1])
    images = _pictures(model, x)
    with _tried("encode", "latents"):
        latents = model.encode(images, batch_size=LATENTS)
    _check_latents("encode", latents, x)


def _condition(model: Any) -> Conditioning:  # noqa: ANN401
    """The conditioning of two prompts; a third one, left out again, repeats the first, as prompts may."""
    with _tried("classes", "a tuple of names"):
        own = unwrapped(model)
        names = own.classes if isinstance(own, HasClasses) else None
    if names is not None and not (
        isinstance(names, tuple | list) and names and all(isinstance(name, str) for name in names)
    ):
        raise Fault(f"whose 'classes' are {names!r:.60}, not a tuple of names")
    first, second = [*(classes_of(model) or ["a cat"]), ""][:2]
    prompts = [first, second, first]
    with _tried("encode_text", "a Conditioning"):
        condition = model.encode_text(prompts)
    if not isinstance(condition, Conditioning):
        raise Fault(f"whose 'encode_text' returns a {type(condition).__name__}, not a Conditioning")
    if list(condition.prompts) != prompts:
        raise Fault(f"whose 'encode_text' returns the prompts {list(condition.prompts)!r:.60}, not {prompts} as given")
    return condition[:LATENTS]


def _kernel(model: Any) -> ReverseKernel:  # noqa: ANN401
    with _tried("kernel", "a ReverseKernel"):
        kernel = model.kernel(2, eta=0.0, noisy_steps=1)
        if not isinstance(kernel, ReverseKernel):
            raise Fault(f"whose 'kernel' returns a {type(kernel).__name__}, not a ReverseKernel")
        steps, tables = len(kernel), (kernel.timesteps, kernel.stochastic)
    if steps < 1 or not all(isinstance(table, Tensor) and table.shape == (steps,) for table in tables):
        sizes = " and ".join(_sized(table) for table in tables)
        raise Fault(f"whose 'kernel' has {sizes} as 'timesteps' and 'stochastic', not one number for each step")
    return kernel


def _prediction(model: Any, x: Tensor, time: Tensor, condition: Conditioning, guidance: float) -> Tensor:  # noqa: ANN401
    part = f"predict(guidance={guidance:g})"
    with _tried(part, "a float32 tensor"):
        prediction = model.predict(x, time, condition, guidance=guidance)
    return _check_latents(part, prediction, x)


def _try_step(kernel: ReverseKernel, prediction: Tensor, x: Tensor) -> None:
    """The first step as sampling takes it, one for the batch, and as training does, one for each latent."""
    for index in (0, torch.zeros(len(x), dtype=torch.long, device=x.device)):
        with _tried("kernel.step", "a Gaussian"):
            step = kernel.step(prediction, x, index)
        if not isinstance(step, Gaussian):
            raise Fault(f"whose 'kernel.step' returns a {type(step).__name__}, not a Gaussian")
        _check_latents("kernel.step", step.mean, x)
        with _tried("kernel.x0", "latents"):
            clean = kernel.x0(prediction, x, index)
        _check_latents("kernel.x0", clean, x)


def _try_backward(model: Any, x: Tensor, time: Tensor, condition: Conditioning) -> None:  # noqa: ANN401
    """One backward pass into the denoiser's weights; each gradient is dropped as soon as it is there."""
    reached = set[int]()

    def drop(weight: Tensor) -> None:
        reached.add(id(weight))
        weight.grad = None

    # whole numbers, of quantized layers, have no gradient
    weights = [weight for weight in model.denoiser.parameters() if weight.is_floating_point()]
    with ExitStack() as undone, _tried("predict", "a result with a gradient"), torch.enable_grad():
        for weight in weights:
            undone.callback(weight.requires_grad_, False)
            handle = weight.requires_grad_(True).register_post_accumulate_grad_hook(drop)
            undone.callback(handle.remove)
        try:
            prediction = model.predict(x, time, condition, guidance=1.0)
            if prediction.requires_grad:
                prediction.sum().backward()
        except torch.OutOfMemoryError:
            return  # a model too large to train here can still draw
    if weights and not reached:
        raise Fault("whose 'predict' returns a result without a gradient, not one that reaches the denoiser's weights")


def _pictures(model: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    with _tried("decode", "pictures"):
        images = model.decode(x, batch_size=LATENTS)
    n, shape = len(x), tuple(images.shape) if isinstance(images, Tensor) else ()
    if len(shape) != 4 or shape[0] != n or shape[1] not in (1, 3):
        raise Fault(f"whose 'decode' returns {_sized(images)}, not ({n}, 3, h, w), or ({n}, 1, h, w) in grey")
    _check_numbers("decode", images)
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise Fault(f"whose 'decode' returns pictures from {low:.3g} to {high:.3g}, not in [0, 1]")
    return images


def _check_latents(part: str, given: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    if not isinstance(given, Tensor) or given.shape != x.shape:
        raise Fault(f"whose {part!r} returns {_sized(given)}, not {tuple(x.shape)} as the latents")
    _check_numbers(part, given)
    return given


def _check_numbers(part: str, given: Tensor) -> None:
    if given.dtype != torch.float32:
        raise Fault(f"whose {part!r} returns {given.dtype}, not torch.float32")
    if not bool(given.isfinite().all()):
        raise Fault(f"whose {part!r} returns NaN or infinite numbers, not finite ones")


def _sized(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def _tried(part: str, wanted: str) -> Iterator[None]:
    """Turn what a part raises into a fault."""
    try:
        yield
    except (Fault, torch.OutOfMemoryError):
        raise  # smaller batches or another device may help a lack of memory
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything, or try to end the program
        why = f"{type(error).__name__}: {one_line(error)}{place_of(error)}"
        raise Fault(f"whose {part!r} fails ({why}), instead of returning {wanted}") from error
