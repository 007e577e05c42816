"""Mamba2's fused token mixer on a GPU, beside the least time that its work can take.

    PYTHONPATH=src:. python bench/kernels/mamba2.py [--out FILE]

A row holds the median time of one layer's call, between its projections, replayed from a CUDA graph
over pools larger than the L2 cache, and its floor: the larger of bytes moved over the copy rate and
operations over the matrix rate. Shapes are Nemotron-3-Nano's (8 groups, chunks of 128) and Bamba's
(1 group, chunks of 256).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels.timing import Row, parse, report, time_us
from tests.kernels.mixers import Batch, Pools, make_pools, make_projected, space
from tests.kernels.ssd import (
    BAMBA,
    NEMOTRON,
    Shapes,
    lay_out,
    make_weights,
)

from milepost.kernels.platform.device import probe

DEVICE = torch.device("cuda", 0)
SHAPES = {"nemotron": NEMOTRON, "bamba": BAMBA}


def rows() -> Iterator[Row]:
    for name, shapes in SHAPES.items():
        for count in (1, 16, 64):
            yield row(shapes, f"{name}: decode, {count} sequences", count, 0)
        for count, length in ((1, 128), (1, 512), (1, 2048), (1, 8192), (32, 256)):
            yield row(shapes, f"{name}: prefill, {count} x {length} tokens", count, length)


def row(shapes: Shapes, title: str, count: int, length: int) -> Row:
    """A prefill, or where `length` is 0 a decode."""
    tokens = count * max(length, 1)
    state = 4 * shapes.inner * shapes.state_size + 2 * shapes.channels * (shapes.taps - 1)
    per_token = 2 * (sum(shapes.sizes) + shapes.inner)
    return {
        "op": title,
        "median_us": time_us(list(_calls(shapes, count, length))),
        "bytes": 2 * count * state + tokens * per_token,
        "flops": tokens * _token_flops(shapes) if length else 0,
    }


def _token_flops(shapes: Shapes) -> int:
    """Operations of the matrix products for one token: what its group's C has in common with the B
    of half a chunk; for each head half a chunk's x, the state that is read, the state's change."""
    of_group = shapes.chunk * shapes.state_size
    of_head = shapes.chunk * shapes.head_dim + 4 * shapes.head_dim * shapes.state_size
    return shapes.groups * of_group + shapes.heads * of_head


def _calls(shapes: Shapes, count: int, length: int) -> Iterator[Callable[[], object]]:
    """With slots of their own, which together outgrow the cache."""
    turns = max(2, -(-64 // count))
    weights = make_weights(shapes, torch.bfloat16, "cuda")
    small = make_pools(shapes, 3, torch.bfloat16, "cuda")
    pools = Pools(
        conv=space(small.conv[1:2].expand(1 + turns * count, -1, -1), 0),
        recurrent=space(small.recurrent[1:2].expand(1 + turns * count, -1, -1, -1), 0),
    )
    wide = make_projected(shapes, count * max(length, 1), torch.bfloat16, "cuda")
    projected = wide.contiguous()  # as a layer's projection leaves it
    for turn in range(turns):
        slots = range(1 + turn * count, 1 + (turn + 1) * count)
        batch = Batch(
            starts=[0] * count if length else [],
            lengths=[length] * count if length else [],
            slot_in=slots,
            slot_out=slots,
        )
        layout, places = lay_out(shapes, batch, DEVICE, probe(DEVICE), {})
        yield partial(shapes.operation.mix, projected, weights, pools.states(places), layout)


if __name__ == "__main__":
    report(rows(), parse(__doc__))
