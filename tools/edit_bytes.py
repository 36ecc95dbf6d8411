"""Hash the LoRAs of short runs (preset demo, two iterations), to show that a change keeps every byte.

    python tools/edit_bytes.py OUT [METHOD ...]                 # this checkout, all policy gradients
    PYTHONPATH=../old/src python tools/edit_bytes.py OUT ddpo   # another one, e.g. `git worktree add ../old 5d62ef3`

Bytes depend on the number of threads and on the CPU, so compare runs of one machine: one thread is set here.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

METHODS = ("anchored", "cgru", "ddpo", "dpok")
SETTINGS = ("policy.iterations=2", "policy.trajectories=8", "critic.trajectories=8", "prompts.validation=4")
LORA = "edit/pytorch_lora_weights.safetensors"


def main(out: Path, *methods: str) -> None:
    """Train each method under `out` and print the sha256 of its LoRA."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for method in methods or METHODS:
        command = [sys.executable, "-m", "cgru", "unlearn", "Dogs", "--preset", "demo", "--method", method]
        finished = subprocess.run(
            [*command, "--device", "cpu", "--out", str(out), *SETTINGS],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        run = Path(finished.stdout.strip().splitlines()[-1])
        print(method, hashlib.sha256((run / LORA).read_bytes()).hexdigest(), run.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
