"""One byte budget, spent three ways: on pages and slots apart, and on one pool of equal blocks.

    python bench/one_pool.py TRACE [--gib 32 64 128] [--cost hybrid-35b-a3b-h200]

Requests run one after the other; beside the budget each side has room for the longest. Pages and
slots are split by the engine's rule, a sixth for slots, and by other shares; `moving` is one arena,
whose boundary between pages and slots moves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from milepost.cache.memory import fit
from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.one_pool import one_pool
from milepost.simulator.slots import replay
from milepost.simulator.trace import Trace, read_trace

SHARES = (0.1, 1 / 6, 0.2, 1 / 3, 0.5)
BLOCKS = (544, 2048)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gib", nargs="+", type=float, default=[32, 64, 128])
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    cost = read_cost(arguments.cost)
    trace = read_trace(arguments.trace, limit=arguments.limit)
    table = Table(title=f"{trace.name}: hit %, bound {100 * trace.bound():.1f}", box=None)
    names = [f"one pool, {block}" for block in BLOCKS] + ["moving"]
    names += [f"slots {s:.0%}" for s in SHARES]
    for column in ("GiB", *names):
        table.add_column(column, justify="right")
    for gib in track(arguments.gib, console=Console(stderr=True), transient=True):
        table.add_row(f"{gib:g}", *_figures(trace, cost, int(gib * 2**30)))
    Console(width=120).print(table)
    return 0


def _figures(trace: Trace, cost: CostModel, memory_bytes: int) -> list[str]:
    hits = [one_pool(trace, cost, memory_bytes, block).hits(trace) for block in BLOCKS]
    hits.append(_moving(trace, cost, memory_bytes))
    for share in SHARES:
        num_slots = int(memory_bytes * share / cost.state_bytes)
        num_tokens = int(memory_bytes * (1 - share) / cost.page_token_bytes)
        cache = replay(trace, num_slots, num_pages=num_tokens // trace.page_size)
        hits.append(cache.stats.hits)
    return [f"{100 * hit / trace.input_tokens:.2f}" for hit in hits]


def _moving(trace: Trace, cost: CostModel, memory_bytes: int) -> int:
    """Hits in one arena."""
    page_bytes = trace.page_size * cost.page_token_bytes
    longest = max(request.input_length for request in trace.requests)
    running = -(-longest // trace.page_size) * page_bytes + cost.state_bytes
    arena = fit(memory_bytes + running, page_bytes=page_bytes, slot_bytes=cost.state_bytes)
    return replay(trace, 0, memory=arena).stats.hits


if __name__ == "__main__":
    sys.exit(main())
