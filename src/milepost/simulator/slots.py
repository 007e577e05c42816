"""Replays a trace with a single limit: the number of state slots.

Requests run one after the other; KV is never evicted, a running request's own slot is not counted,
answers leave nothing. The result, the share of the input tokens that a saved state makes reusable,
depends only on which states are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from milepost.cache import Cache
from milepost.simulator.chain import TraceChain
from milepost.simulator.policies import AUTO, CachePolicy
from milepost.simulator.trace import Trace


def replay(
    trace: Trace,
    num_slots: int,
    *,
    policy: CachePolicy = AUTO,
    num_pages: int | None = None,
    on_request: Callable[[int], None] | None = None,
) -> Cache:
    """Run the trace through a cache with `num_slots` slots for checkpoints; returns the cache.

    With `num_pages` KV is limited too, to so many beside those of the longest request.
    """
    longest = max(request.input_length for request in trace.requests)
    num_kept = trace.num_page_ids if num_pages is None else num_pages
    cache = policy.cache(
        num_pages=num_kept + -(-longest // trace.page_size),
        num_slots=num_slots + 1,
        page_size=trace.page_size,
    )
    digests = trace.digests()
    for number, request in enumerate(trace.requests, start=1):
        chain = TraceChain(request, trace.page_size, digests)
        allocation = cache.admit(chain, cache.match(chain))
        assert allocation is not None, "there is room for every page, and for one running request"
        end = len(chain)
        exports = cache.take_exports(allocation, end)
        written = {allocation.slot_out: end} | {e.slot: e.position for e in exports}
        cache.commit(allocation, end, written)
        cache.release(allocation)
        if on_request is not None:
            on_request(number)
    return cache
