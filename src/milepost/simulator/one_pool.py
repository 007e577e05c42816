"""What to compare with besides policies: states and KV in one pool of equal blocks.

A model of an engine that rounds its block up until a state fits into few of them: KV is reused in
whole blocks, a state is kept at the last block boundary of a prompt and where a prompt leaves known
KV, and everything that no request uses stands in one queue by time of release. A request's states
are released before its KV, and its KV from the end, so a state goes before the KV that it makes
usable. Requests run one after the other; answers leave nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from milepost.simulator.cost import CostModel
from milepost.simulator.trace import Trace, TraceRequest

Key = tuple[str, int]
"""What a block holds: "kv" or "state", and the id of the last page in front of its end."""


@dataclass(slots=True, kw_only=True)
class OnePool:
    """`num_blocks` equal blocks of `pages_each` trace pages; a state takes `blocks_a_state`."""

    num_blocks: int
    pages_each: int
    blocks_a_state: int

    def hits(self, trace: Trace) -> int:
        """Prompt tokens of the trace that are reused."""
        cached: OrderedDict[Key, int] = OrderedDict()
        num_used = 0
        hits = 0
        for request in trace.requests:
            found, wanted = self._match(request, cached)
            hits += found * self.pages_each * trace.page_size
            for key, size in wanted.items():
                num_used += size - cached.pop(key, 0)
                cached[key] = size
            while num_used > self.num_blocks and cached:
                num_used -= cached.popitem(last=False)[1]
        return hits

    def _match(
        self, request: TraceRequest, cached: OrderedDict[Key, int]
    ) -> tuple[int, dict[Key, int]]:
        """Blocks that are reused, and what the request leaves in order of release."""
        ends = request.page_ids[self.pages_each - 1 :: self.pages_each]
        num_kv = 0
        while num_kv < len(ends) and ("kv", ends[num_kv]) in cached:
            num_kv += 1
        usable = num_kv if num_kv * self.pages_each < len(request.page_ids) else num_kv - 1
        found = usable
        while found > 0 and ("state", ends[found - 1]) not in cached:
            found -= 1
        places = [found, max(found, num_kv), len(ends)]
        states = {("state", ends[p - 1]): self.blocks_a_state for p in places if p > 0}
        return max(found, 0), states | {("kv", end): 1 for end in reversed(ends)}


def one_pool(trace: Trace, cost: CostModel, memory_bytes: int, block_size: int) -> OnePool:
    """Of a size in bytes, with blocks of at least `block_size` tokens, in whole pages; and beside
    that room for the longest request.
    """
    pages_each = -(-block_size // trace.page_size)
    block_bytes = pages_each * trace.page_size * cost.page_token_bytes
    longest = max(request.input_length for request in trace.requests)
    blocks_a_state = -(-cost.state_bytes // block_bytes)
    running = -(-longest // (pages_each * trace.page_size)) + blocks_a_state
    return OnePool(
        num_blocks=memory_bytes // block_bytes + running,
        pages_each=pages_each,
        blocks_a_state=blocks_a_state,
    )
