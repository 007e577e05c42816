"""Hit rates with state slots as the only limit.

    python bench/slots.py TRACE [--num-slots 64 128 256] [--policies auto ends]

Requests run one after the other, KV is never evicted, a running request's own slot is not counted,
and answers leave nothing. So the share of the prompt tokens that is reused depends only on the
states that are kept. The table of docs/policies.md, "Slots limited alone".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peer_policies import ALL_POLICIES
from rich.console import Console
from rich.table import Table

from milepost.cache import Cache
from milepost.simulator.chain import TraceChain
from milepost.simulator.policies import AUTO, CachePolicy
from milepost.simulator.trace import Trace, read_trace


def replay(trace: Trace, num_slots: int, *, policy: CachePolicy = AUTO) -> Cache:
    """Runs the trace through a cache with `num_slots` slots for checkpoints; returns the cache."""
    longest = max(request.input_length for request in trace.requests)
    cache = policy.cache(
        num_pages=trace.num_page_ids + -(-longest // trace.page_size),
        num_slots=num_slots + 1,
        page_size=trace.page_size,
    )
    digests = trace.digests()
    for request in trace.requests:
        chain = TraceChain(request, trace.page_size, digests)
        allocation = cache.admit(chain, cache.match(chain))
        assert allocation is not None, "there is room for every page, and for one running request"
        end = len(chain)
        exports = cache.take_exports(allocation, end)
        written = {allocation.slot_out: end} | {e.slot: e.position for e in exports}
        cache.commit(allocation, end, written)
        cache.release(allocation)
    return cache


def main() -> int:
    ours = {name: p for name, p in ALL_POLICIES.items() if isinstance(p, CachePolicy)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num-slots", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--policies", nargs="+", default=["auto"], choices=ours)
    parser.add_argument("--limit", type=int, default=None, help="requests of the trace")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, limit=arguments.limit)
    table = Table(title=f"{trace.name}: hit %, bound {100 * trace.bound():.2f}", box=None)
    for column in ("slots", *arguments.policies):
        table.add_column(column, justify="right")
    for num_slots in arguments.num_slots:
        found = [replay(trace, num_slots, policy=ours[name]) for name in arguments.policies]
        rates = [cache.stats.hits / cache.stats.queries for cache in found]
        table.add_row(f"{num_slots}", *(f"{100 * rate:.2f}" for rate in rates))
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
