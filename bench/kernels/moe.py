"""One layer's routed experts on a GPU, beside the least time that their work can take.

    PYTHONPATH=src:. python bench/kernels/experts.py [--out FILE] [--copy-gbps N] [--tflops N]

The 35B-A3B shape: 256 experts and a shared one, 8 chosen, hidden size 2048, size 512. Each token
chooses at random, so the floor is that of the experts touched: the larger of their weights over the
copy rate and their operations over the matrix rate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.timing import Row, parse, report, time_us

from milepost.kernels import norm, products
from milepost.kernels.products import Raw, mix

HIDDEN, SIZE, EXPERTS, CHOSEN = 2048, 512, 257, 8
TOKENS = (1, 8, 16, 64, 80, 512, 2048, 8192)
EXPERT_WEIGHTS = 3 * HIDDEN * SIZE


def main() -> None:
    report(bench(), parse(__doc__))


def bench() -> Iterator[Row]:
    gate_up = fill(EXPERTS, 2 * SIZE, HIDDEN)
    down = fill(EXPERTS, HIDDEN, SIZE)
    for num_tokens in TOKENS:
        yield from bench_tokens(num_tokens, gate_up, down)


def bench_tokens(num_tokens: int, gate_up: Tensor, down: Tensor) -> Iterator[Row]:
    turns = range(max(1, min(12, 256 // num_tokens)))
    hidden = [fill(num_tokens, HIDDEN) for _ in turns]
    logits = [fill(num_tokens, EXPERTS) for _ in turns]
    routed = [route(each) for each in logits]
    scale = torch.ones(HIDDEN, device="cuda")
    num_rows = num_tokens * (CHOSEN + 1)
    touched = sum(experts.unique().numel() for _, experts in routed) / len(turns)
    weights = Raw(values=gate_up), Raw(values=down)
    parts = mix(hidden[0], *routed[0], *weights)

    def row(op: str, call: Callable[[int], object], num_bytes: float, flops: int = 0) -> Row:
        median_us = time_us([partial(call, turn) for turn in turns])
        named = {"op": op, "tokens": num_tokens, "experts_touched": touched}
        return named | {"median_us": median_us, "bytes": num_bytes, "flops": flops}

    yield row("route", lambda turn: route(logits[turn]), 2 * logits[0].numel())
    yield row(
        "experts",
        lambda turn: mix(hidden[turn], *routed[turn], *weights),
        2 * (touched * EXPERT_WEIGHTS + num_rows * HIDDEN),
        2 * EXPERT_WEIGHTS * num_rows,
    )
    yield row(
        "add and norm",
        lambda turn: norm.add_norm(hidden[turn], parts, scale, 1e-6),
        2 * HIDDEN * (num_rows + 3 * num_tokens),
    )


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    return products.route(logits, CHOSEN, normalise=True, num_shared=1)


def fill(*shape: int) -> Tensor:
    filled: Tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
    return filled


if __name__ == "__main__":
    main()
