"""One byte budget, spent three ways: on pages and slots in one memory, on both apart, and on one
pool of equal blocks.

    python bench/one_pool.py TRACE [--limit 2000] [--gib 32 64 128] [--cost hybrid-35b-a3b-h200]

In virtual time under the one scheduler. `auto` has one memory, whose boundary moves; `auto-split`
gives slots a sixth, the engine's rule, and other shares. The bytes of running requests are part of
the budget on every side.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES, Pooled
from milepost.simulator.results import percentile
from milepost.simulator.trace import Trace, read_trace

SHARES = (0.1, 1 / 6, 0.2, 1 / 3, 0.5)


@dataclass(frozen=True, slots=True)
class Row:
    """A policy, and the slots' share of the bytes where it splits them."""

    policy: str
    slots_share: float | None = None

    def __str__(self) -> str:
        return self.policy if self.slots_share is None else f"{self.policy}, {self.slots_share:.0%}"


ROWS = (
    Row("auto"),
    *(Row("auto-split", share) for share in SHARES),
    *(Row(name) for name, policy in POLICIES.items() if isinstance(policy, Pooled)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gib", nargs="+", type=float, default=[32, 64, 128])
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    cost = read_cost(arguments.cost)
    trace = read_trace(arguments.trace, limit=arguments.limit)
    trace.link_answers()
    title = f"{trace.name}: hit %, p90 time to first token; bound {100 * trace.bound():.1f}"
    table = Table(title=title, box=None)
    for name in ("", *(f"{gib:g} GiB" for gib in arguments.gib)):
        table.add_column(name, justify="right")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        whole = progress.add_task(trace.name, total=len(ROWS) * len(arguments.gib))
        for row in ROWS:
            cells = []
            for gib in arguments.gib:
                progress.update(whole, description=f"{row}, {gib:g} GiB")
                cells.append(_figures(trace, cost, int(gib * 2**30), row))
                progress.advance(whole)
            table.add_row(str(row), *cells)
    Console(width=120).print(table)
    return 0


def _figures(trace: Trace, cost: CostModel, memory_bytes: int, row: Row) -> str:
    num_slots = int(memory_bytes * (row.slots_share or 1 / 6) / cost.state_bytes)
    kv_bytes = memory_bytes - num_slots * cost.state_bytes
    num_pages = int(kv_bytes / cost.page_token_bytes) // trace.page_size
    cache = POLICIES[row.policy].memory(
        cost, num_pages=num_pages, num_slots=num_slots, page_size=trace.page_size
    )
    closed = trace.requests[0].session is not None
    run = Replay(trace, cache, cost, closed=closed).run()
    hit = 100 * cache.stats.hits / cache.stats.queries
    return f"{hit:.2f} {percentile(run.ttft_s, 0.9):.1f} s"


if __name__ == "__main__":
    sys.exit(main())
