"""KDA's fused token mixer on a GPU, beside the least time that its work can take.

    PYTHONPATH=src:. python bench/kernels/kda.py [--out FILE]

A row holds the median time of one layer's call, behind its projections, replayed from a CUDA graph
over pools larger than the L2 cache, and its floor: the larger of bytes moved over the copy rate and
operations over the matrix rate. The shape is Kimi-Linear-48B-A3B's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels.timing import Row, parse, report, time_us
from tests.kernels.kimi import REAL, make_weights
from tests.kernels.mixers import Batch, Pools, make_pools, make_projected, space
from tests.kernels.ssd import lay_out

from milepost.kernels.platform.device import probe
from milepost.kernels.recurrent import CHUNK, KDAProjected

DEVICE = torch.device("cuda", 0)


def rows() -> Iterator[Row]:
    for count in (1, 16, 64):
        yield row(f"decode, {count} sequences", count, 0)
    for count, length in ((1, 128), (1, 512), (1, 2048), (1, 8192), (32, 256)):
        yield row(f"prefill, {count} x {length} tokens", count, length)


def row(title: str, count: int, length: int) -> Row:
    """A prefill, or where `length` is 0 a decode."""
    tokens = count * max(length, 1)
    state = 4 * REAL.size * REAL.head_dim + 2 * REAL.channels * (REAL.taps - 1)
    return {
        "op": title,
        "median_us": time_us(list(_calls(count, length))),
        "bytes": 2 * count * state + tokens * 2 * (sum(REAL.sizes) + REAL.size),
        "flops": tokens * _token_flops() if length else 0,
    }


def _token_flops() -> int:
    """Operations of the matrix products for one token of a head: half a chunk's keys with its query
    and its key, the system's solution for u and w, half a chunk's values; what w and the query read
    of the state, the state's change."""
    return REAL.heads * REAL.head_dim * (5 * CHUNK + 6 * REAL.head_dim)


def _calls(count: int, length: int) -> Iterator[Callable[[], object]]:
    """With slots of their own, which together outgrow the cache."""
    turns = max(2, -(-64 // count))
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    small = make_pools(REAL, 3, torch.bfloat16, "cuda")
    pools = Pools(
        conv=space(small.conv[1:2].expand(1 + turns * count, -1, -1), 0),
        recurrent=space(small.recurrent[1:2].expand(1 + turns * count, -1, -1, -1), 0),
    )
    whole = make_projected(REAL, count * max(length, 1), torch.bfloat16, "cuda")
    projected, decay, gate = whole.split((sum(REAL.sizes[:2]), REAL.size, REAL.size), -1)
    inputs = KDAProjected(projected, decay.contiguous(), gate.contiguous()), weights
    for turn in range(turns):
        slots = range(1 + turn * count, 1 + (turn + 1) * count)
        batch = Batch(
            starts=[0] * count if length else [],
            lengths=[length] * count if length else [],
            slot_in=slots,
            slot_out=slots,
        )
        layout, places = lay_out(REAL, batch, DEVICE, probe(DEVICE), {})
        yield partial(REAL.operation.mix, *inputs, pools.states(places), layout)


if __name__ == "__main__":
    report(rows(), parse(__doc__))
