"""How the benchmarks of kernels time a call, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

Row = dict[str, Any]


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median over replays of a graph with all the calls, for one of them.

    Give enough calls with data of their own that together they outgrow the L2 cache.
    """
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    milliseconds: float = do_bench(graph.replay, warmup=30, rep=100, return_mode="median")
    return milliseconds * 1e3 / len(calls)


def parse(document: str) -> argparse.Namespace:
    """The options that the benchmarks share; `document` begins with what the benchmark times."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the rows here, one JSON object a line")
    parser.add_argument("--copy-gbps", type=float, default=4280, help="measured memory bandwidth")
    parser.add_argument("--tflops", type=float, default=787, help="measured rate of GEMMs")
    return parser.parse_args()


def report(rows: Iterable[Row], arguments: argparse.Namespace) -> None:
    """Print and write rows that hold `median_us`, `bytes` and `flops`, with their floor."""
    lines = []
    for row in rows:
        moved_us = row["bytes"] / arguments.copy_gbps / 1e3
        floor_us = max(moved_us, row["flops"] / arguments.tflops / 1e6)
        row |= {"floor_us": floor_us, "times_floor": row["median_us"] / floor_us}
        lines.append(json.dumps(row | {"gpu": torch.cuda.get_device_name()}))
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
