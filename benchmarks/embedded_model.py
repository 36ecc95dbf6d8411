"""What one call of the embedded model costs: GFLOP and milliseconds per sample of each network.

FLOPs are counted by torch's FlopCounterMode under the math attention backend (multiply and add are two), at batch 1.
Times are medians over batches on this machine's CPU; the ratio column sets each against the denoiser in the same run.

    python benchmarks/embedded_model.py [--batch 16] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionModelWithProjection

from cgru.backbones import load_model
from cgru.embedded import ROOT
from cgru.evaluation.judges.classifiers import load_judge

LIMITS = {"denoiser": 1.0, "decode": 0.6}
"""GFLOP per sample that the design allows."""

Piece = Callable[[int], object]


@dataclass(frozen=True)
class Row:
    """What was measured of one network."""

    piece: str
    gflop: float
    limit: float | None
    ms: float


def pieces() -> dict[str, Piece]:
    """Each network as a function of the batch size."""
    model = load_model("emoji-canvas", device="cpu")
    tower = CLIPVisionModelWithProjection.from_pretrained(ROOT / "emoji-canvas" / "clip", dtype=torch.float32).eval()
    judge = load_judge("object")
    text = model.encode_text(["A Dogs image in Flat style"])
    middle = torch.tensor([500])

    def latents(count: int) -> Tensor:
        return torch.randn((count, *model.latent_shape), generator=torch.Generator().manual_seed(0))

    def images(count: int) -> Tensor:
        return torch.rand((count, 3, 64, 64), generator=torch.Generator().manual_seed(0))

    def denoise(count: int) -> object:
        cond = text[torch.zeros(count, dtype=torch.long)]
        return model.predict(latents(count), middle.expand(count), cond, guidance=1.0)

    return {
        "denoiser": denoise,
        "decode": lambda count: model.decode(latents(count)),
        "encode": lambda count: model.encode(images(count)),
        "CLIP vision tower": lambda count: tower(images(count) * 2 - 1),
        "object judge": lambda count: judge.look(images(count)),
    }


def gflop(piece: Piece) -> float:
    """Billions of floating-point operations for one sample."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        piece(1)
    return counter.get_total_flops() / 1e9


def milliseconds(piece: Piece, batch: int, repeats: int) -> float:
    """Median time per sample."""
    piece(batch)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        piece(batch)
        times.append((time.perf_counter() - start) / batch * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    with torch.no_grad():
        rows = [
            Row(name, gflop(piece), LIMITS.get(name), milliseconds(piece, arguments.batch, arguments.repeats))
            for name, piece in pieces().items()
        ]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {arguments.batch}, {platform.machine()}"
    )
    print(f"{'piece':<20}{'GFLOP':>8}{'limit':>8}{'ms':>9}{'of denoiser':>13}{'GFLOP/s':>10}")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.1f}"
        ratio, speed = row.ms / rows[0].ms, row.gflop / row.ms * 1e3
        print(f"{row.piece:<20}{row.gflop:>8.3f}{limit:>8}{row.ms:>9.2f}{ratio:>13.2f}{speed:>10.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
