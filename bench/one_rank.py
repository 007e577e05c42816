"""A benchmark as one rank of several would run it, on one GPU: its sums cost nothing.

    python bench/one_rank.py 2 engine.py --only decode cold
    python bench/one_rank.py 2 profile_step.py --sequences 1 16 64 --cold 8192

The first number says how many ranks there are; the rest is another benchmark of this folder and
what it is told. The rank keeps its part of each layer and goes on with its own sum alone, added up
by the launch that one GPU has: answers mean nothing; sizes, launches and times are a rank's. What
so many GPUs take longer is what they wait for each other; what a rank takes longer than its part
of one GPU's time is what every rank does again, or does less well on smaller parts.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from milepost.engine.assembly import rank, setup
from milepost.kernels import norm
from milepost.kernels.layout.emit import values_of
from milepost.parallel import Ranks


class NoLink:
    """A `Link` to ranks that all have what this one has, and that nobody waits for."""

    order = ""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat([values] * self._size, -1)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = norm.add_norm(hidden, partials, scale, eps, multiplier)
        return total, values_of(normed)

    def least(self, value: int) -> int:
        return value

    def gather(self, body: bytes) -> list[bytes]:
        return [body] * self._size


def _first(ranks: Ranks, *_: object) -> Ranks:
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("benchmark")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("given", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    size = arguments.ranks
    ranks = Ranks(size=size, link=NoLink(size), splits_experts=arguments.expert_parallel)
    mock.patch.object(setup, "ALONE", ranks).start()
    mock.patch.object(rank, "_reaching", _first).start()
    script = Path(__file__).parent / arguments.benchmark
    sys.argv = [str(script), *arguments.given]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
