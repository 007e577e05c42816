"""Equal blocks with one eviction queue: the pool of `OnePool`.

A *holding* is a run of blocks that is cached under a key: the KV of one block's tokens, or a state.
It is not in the queue while requests use it; it joins the queue's end when the last one leaves it.
The holding that has waited longest is evicted whole. A `Hold` is one running request's blocks.

Invariant: used + queued + free == total.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from milepost.cache.allocation import Allocation, State
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import Kind, PromptFacts, floor
from milepost.cache.plans import Export
from milepost.cache.tree import Chain, End, Match

Place = tuple[int, bytes]
"""A block's end: the block's number in the prompt, and the digest of everything up to there."""
Key = tuple[Literal["kv", "state"], Place]
"""Names a holding: a block's KV, or the state at its end."""


@dataclass(slots=True, eq=False)
class Holding:
    """`num_blocks` blocks under one key."""

    num_blocks: int
    num_users: int = 1
    num_uses: int = 0
    """Number of requests that resumed from it."""


class BlockPool:
    """`total` blocks, all free at the start."""

    __slots__ = ("_held", "_queue", "num_queued", "num_used", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_used = 0
        self.num_queued = 0
        self._held: dict[Key, Holding] = {}
        self._queue: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __getitem__(self, key: Key) -> Holding:
        return self._held[key]

    @property
    def room(self) -> int:
        """Number of blocks that can be allocated if the whole queue is evicted."""
        return self.total - self.num_used

    def allocate(self, num: int) -> list[tuple[Key, Holding]]:
        """Takes blocks for a request; returns the evicted holdings. The caller has checked the
        room.
        """
        assert num <= self.room, "no more is allocated than is free or queued"
        evicted = []
        while self.total - self.num_used - self.num_queued < num:
            key, _ = self._queue.popitem(last=False)
            holding = self._held.pop(key)
            self.num_queued -= holding.num_blocks
            evicted.append((key, holding))
        self.num_used += num
        return evicted

    def free(self, num: int) -> None:
        """Frees blocks that have no key."""
        self.num_used -= num

    def hold(self, key: Key, num_blocks: int) -> bool:
        """Names blocks in use. A queued copy is dropped for them; if a request uses a copy, they
        stay without a name, and the result is False.
        """
        held = self._held.get(key)
        if held is not None:
            if held.num_users:
                return False
            del self._queue[key]
            self.num_queued -= held.num_blocks
        self._held[key] = Holding(num_blocks)
        return True

    def queued_among(self, keys: list[Key]) -> int:
        """Number of blocks held under `keys` and not in use."""
        held = (self._held[key] for key in keys)
        return sum(holding.num_blocks for holding in held if not holding.num_users)

    def use(self, key: Key) -> None:
        """Takes a holding out of the queue, or shares it."""
        holding = self._held[key]
        if not holding.num_users:
            del self._queue[key]
            self.num_queued -= holding.num_blocks
            self.num_used += holding.num_blocks
        holding.num_users += 1

    def leave(self, key: Key) -> None:
        """Stops using a holding; the last user sends it to the queue's end."""
        holding = self._held[key]
        holding.num_users -= 1
        if not holding.num_users:
            self._queue[key] = None
            self.num_queued += holding.num_blocks
            self.num_used -= holding.num_blocks

    def check(self) -> None:
        """Recounts the invariant from scratch; for tests."""
        unused = [key for key, holding in self._held.items() if not holding.num_users]
        assert sorted(unused) == sorted(self._queue), "what nobody uses is queued"
        assert self.num_queued == sum(self._held[key].num_blocks for key in unused)
        in_use = sum(h.num_blocks for h in self._held.values() if h.num_users)
        assert in_use <= self.num_used <= self.total - self.num_queued


def aligned_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Places states at the last block boundaries of the prompt and of the KV cached for it."""
    last = floor(facts.prompt_length - 1, facts.block_size)
    kinds = {last: Kind.PROMPT_END} | dict.fromkeys(facts.branch_points, Kind.BRANCH_POINT)
    return {p: kinds[p] for p in sorted(kinds) if start < p <= end}


@dataclass(slots=True)
class Hold:
    """The blocks of one running request, besides those of its own state."""

    used: list[Key]
    """KV that it shares or has published, from the start of the path."""
    source: Key | None
    """The state to resume from, until the first commit."""
    num_kv: int
    """Number of blocks on its path, shared ones included."""
    num_full: int
    """Number of full blocks on its path."""
    num_seen: int
    """Number of pages that are noted as seen."""
    exports: list[Export] = field(default_factory=list)


def new_allocation(chain: Chain, match: Match, block_size: int) -> Allocation:
    """Returns an allocation that resumes where the match says."""
    position = match.report.state_length
    return Allocation(
        chain=chain,
        report=match.report,
        state=State.READY,
        page_table=[],
        path=[],
        state_length=position,
        write_from=position,
        slot_in=ZERO_SLOT,
        slot_out=ZERO_SLOT,
        source=None,
        page_copy=None,
        end=End(position=len(chain), time=0),
        facts=PromptFacts(
            prompt_length=len(chain),
            grid=block_size,
            branch_points=match.branch_points,
            block_size=block_size,
        ),
    )
