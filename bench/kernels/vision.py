"""Times vision towers' attention on a GPU, beside its floor and beside torch's own.

    python bench/kernels/vision.py --out vision.jsonl

Pictures of 640x480, 1080p and 4K, with heads of 64 and of 72 dimensions. Several ways to cut the
kernel are timed; the one that the engine uses is marked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us

from milepost.kernels.vision import PictureFrames
from milepost.kernels.vision.attention import HALVES, VisionTiles, attend

PATCHES = {"640x480": 1200, "1080p": 8160, "4K": 32_640}
HEADS = {64: 16, 72: 16}
TILES = [
    HALVES,
    *(
        VisionTiles(queries, keys, num_warps, num_stages)
        for queries, keys, num_warps in ((64, 64, 4), (128, 64, 4), (128, 128, 8), (64, 128, 4))
        for num_stages in (2, 3)
    ),
]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def rows() -> Iterator[Row]:
    for name, num_patches in PATCHES.items():
        for head_dim, num_heads in HEADS.items():
            shape = (num_patches, 3 * num_heads * head_dim)
            projected = torch.randn(shape, device="cuda").bfloat16()
            frames = PictureFrames(starts=None, lengths=(num_patches,))
            turns = torch.randn(num_patches, head_dim // 2, device="cuda")
            angles = turns.cos(), turns.sin()
            row: Row = {
                "picture": name,
                "head_dim": head_dim,
                "flops": 4 * num_patches**2 * num_heads * head_dim,
                "bytes": 2 * projected.nbytes,
            }
            for tiles in dict.fromkeys(TILES):
                yield row | _timed(
                    partial(attend, projected, angles, num_heads, frames, tiles),
                    f"ours {tuple(tiles)}" + (" *" if tiles == HALVES else ""),
                )
            heads = projected.view(num_patches, 3, num_heads, head_dim).permute(1, 2, 0, 3)
            for backend, kind in BACKENDS.items():
                yield row | _timed(partial(_torchs, heads, kind), f"torch {backend}")


def _timed(call: Callable[[], object], kernel: str) -> Row:
    """The time of a kernel; what does not run says so."""
    try:
        return {"kernel": kernel, "median_us": time_us([call])}
    except Exception as error:  # noqa: BLE001  a tile may not fit, a backend may refuse
        return {"kernel": kernel, "median_us": float("nan"), "error": str(error)[:100]}


def _torchs(heads: Tensor, kind: SDPBackend) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(*(each[None] for each in heads))


if __name__ == "__main__":
    report(rows(), parse(__doc__))
