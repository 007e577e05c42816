"""Sums over GPUs of one machine: one launch over memory that all reach, beside NCCL.

    python bench/all_reduce.py [--ranks 2] [--hidden-size 2048] [--rows 1 4 16 64 256 512 8192]
        [--parts 1 9] [--apart]

Times are of one call within a CUDA graph of many, in microseconds, the median of some replays: of
the sum alone (`sum_us`; of more than 512 rows NCCL's, too), and with the residual and the norm
behind it (`norm_us`), of so many partials on each rank as the layer behind leaves (experts one for
each of a token's); `nccl` is NCCL's all-reduce and the norm's own launch, `local_us` what one GPU
takes for its own partials. `link_us` is how long a peer's rows take at 450 GB/s. Says first
whether both return the same on all ranks, and the first rows by themselves the bits that they have
among all. One JSON row for each number of rows, the most first, for which memory is shared. With
--apart no GPU may access another's memory, as on two cards without NVLink: NCCL does all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import rows
import torch

from milepost.kernels import norm
from milepost.parallel.gloo import GlooLink, open_store
from milepost.parallel.gpu import GpuLink

TIMEOUT_S = 120.0
LINK_BYTES_PER_S = 450e9
CALLS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256, 512, 8192])
    parser.add_argument("--parts", type=int, nargs="*", default=[1])
    parser.add_argument("--apart", action="store_true", help="forbid peer access")
    options = parser.parse_args()
    if options.apart:
        os.environ["NCCL_P2P_DISABLE"] = "1"  # the other ranks have it too
    store = open_store(0, options.ranks, TIMEOUT_S, is_first=True)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=run, args=(rank, store.port, options), daemon=True)
        for rank in range(1, options.ranks)
    ]
    for each in others:
        each.start()
    run(0, store.port, options, store)
    for each in others:
        each.join(TIMEOUT_S)
    return max(each.exitcode or 0 for each in others)


def run(rank: int, port: int, options: argparse.Namespace, store: Any = None) -> None:
    """One rank; the first prints."""
    torch.cuda.set_device(rank)
    store = store or open_store(port, options.ranks, TIMEOUT_S, is_first=False)
    hosts = GlooLink(
        store, rank, options.ranks, timeout_s=TIMEOUT_S, why_lost=lambda: "a rank is lost"
    )
    probe: dict[str, Any] = {"can_access": lambda *_: False} if options.apart else {}
    link = GpuLink(hosts, torch.device("cuda", rank), **probe)
    for num_rows, num_parts in product(sorted(options.rows, reverse=True), options.parts):
        row = measure(link, rank, num_rows, num_parts, options.hidden_size)
        if rank == 0:
            print(json.dumps(rows.provenance() | row), flush=True)
    torch.cuda.synchronize()
    link.least(0)  # nobody lets go before all are through
    link.close()


def measure(
    link: GpuLink, rank: int, num_rows: int, num_parts: int, hidden_size: int
) -> dict[str, Any]:
    """Both ways, of so many rows in so many partials."""
    generator = torch.Generator("cuda").manual_seed(rank)
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    parts = torch.randn(num_rows, num_parts, hidden_size, generator=generator, **like)
    values = parts[:, 0].contiguous()
    hidden = torch.ones(num_rows, hidden_size, **like)
    scale = torch.ones(hidden_size, device="cuda")
    ways: dict[str, Callable[[], Any]] = {
        "sum": partial(link.all_reduce, values),
        "nccl_sum": lambda: torch.distributed.all_reduce(values.clone()),
        "norm": lambda: link.add_norm(hidden, parts, scale, 1e-6, 1.0),
        "nccl_norm": lambda: nccl_norm(hidden, parts, scale),
        "local": lambda: norm.add_norm(hidden, parts, scale, 1e-6),
    }
    ours, theirs = ways["norm"](), ways["nccl_norm"]()
    everywhere = torch.empty(hosts_size(link), *ours[1].shape, **like)
    torch.distributed.all_gather_into_tensor(everywhere, ours[1])
    is_same = all(torch.equal(each, everywhere[0]) for each in everywhere)
    few = min(num_rows, 16)
    alone = link.add_norm(hidden[:few], parts[:few], scale, 1e-6, 1.0)
    error = float((ours[1].float() - theirs[1].float()).abs().max())
    times = {f"{name}_us": time_in_graph(way) for name, way in ways.items()}
    num_bytes = values.nbytes
    return {
        "rows": num_rows,
        "parts": num_parts,
        "bytes": num_bytes,
        "is_same_on_all": is_same,
        "is_same_alone": all(torch.equal(a, b[:few]) for a, b in zip(alone, ours, strict=True)),
        "largest_error": error,
        **times,
        "link_us": (hosts_size(link) - 1) * num_bytes / LINK_BYTES_PER_S * 1e6,
    }


def hosts_size(link: GpuLink) -> int:
    return link._hosts.size


def nccl_norm(hidden: torch.Tensor, parts: torch.Tensor, scale: torch.Tensor) -> Any:
    own = parts.sum(1)
    torch.distributed.all_reduce(own)
    return norm.add_norm(hidden, own, scale, 1e-6)


def time_in_graph(way: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    for _ in range(3):
        way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            way()
    graph.replay()
    found: list[float] = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
