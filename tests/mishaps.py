"""Things that go wrong outside of our code: a full disk, Ctrl-C, a model that has diverged."""

import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing past `size` bytes of any file is an OSError inside, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interruptible(
    command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command that hears Ctrl-C: a shell that runs the tests in the background would have them ignore it."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def diverged(model_folder: Path, folder: Path) -> Path:
    """A copy of the model with one weight that makes every picture NaN."""
    model = shutil.copytree(model_folder, folder)
    file = model / "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["conv_out.bias"][0] = torch.nan
    save_file(weights, file)
    return model
