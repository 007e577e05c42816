"""How much of the cache is likely to be asked for soon, and so is no room for a request
that lets others go first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from milepost.cache.eviction.score import Score
from milepost.cache.memory import Storage
from milepost.cache.tree import Checkpoint, Tree

LOOKS_A_CHANGE = 64
"""Checkpoints that may be looked at for each change of the cache since the last look."""

MAX_LOOKS = 1024
"""Checkpoints that are looked at in one go, about a millisecond. Of more of them some are as they
were at the last look: it is an estimate in any case. But where all are old, requests are let in
whose pages others will want at once.
"""


@dataclass(slots=True, kw_only=True)
class Likely:
    """Cached pages and slots of the deepest checkpoints whose return is likely, and the pages of
    what they build on.
    """

    num_tokens: int = 0
    num_slots: int = 0
    counted: dict[Checkpoint, int] = field(default_factory=dict)
    """Tokens behind the next shallower one, for each whose pages are not in use."""


@dataclass(slots=True, kw_only=True)
class Look:
    """One look at all checkpoints, which takes several changes of the cache if there are many."""

    version: int = -1
    ahead: list[Checkpoint] = field(default_factory=list)
    found: Likely = field(default_factory=Likely)
    last: Likely | None = None
    """What the round before has found."""


class HoldBack:
    """Goes round the checkpoints, a round for each power of two of requests to look ahead."""

    def __init__(self, tree: Tree, storage: Storage, score: Score, page_size: int) -> None:
        self._tree = tree
        self._score = score
        self._pages = storage.pages
        self._slots = storage.slots.pool
        self._page_size = page_size
        self._rounds: dict[int, Look] = {}

    def beside(self, own: Checkpoint | None, within: int, version: int) -> tuple[int, int]:
        """Cached pages and slots that are likely to be asked for within about so many requests, in
        a cache of this version, without the pages of the checkpoint `own` and those above it.
        """
        expected = self._expected(1 << (within - 1).bit_length(), version)
        num_tokens, here = expected.num_tokens, own
        while here is not None:
            num_tokens -= expected.counted.get(here, 0)
            here = here.above
        num_pages = min(num_tokens // self._page_size, self._pages.num_cached)
        return num_pages, min(expected.num_slots, self._slots.num_cached)

    def _expected(self, within: int, version: int) -> Likely:
        turn = self._rounds.setdefault(within, Look())
        if turn.version != version:
            num_looks = min((version - turn.version) * LOOKS_A_CHANGE, MAX_LOOKS)
            turn.version = version
            self._go_on(turn, within, num_looks)
        return turn.last if turn.last is not None else turn.found

    def _go_on(self, turn: Look, within: int, most: int) -> None:
        """Look at so many of the next checkpoints; at all of them anew, if they are no more."""
        at_slot, live_refs, score = self._tree.at_slot, self._slots.live_refs, self._score
        if not turn.ahead or most >= len(at_slot):
            turn.ahead, turn.found = list(at_slot.values()), Likely()
        ahead, found, num_looks = turn.ahead, turn.found, 0
        while ahead and num_looks < most:
            checkpoint = ahead.pop()
            num_looks += 1
            slot = checkpoint.slot
            is_kept = at_slot.get(slot) is checkpoint
            if not is_kept or checkpoint.below or live_refs(slot):
                continue
            if not score.is_expected(checkpoint, within):
                continue
            found.num_slots += 1
            for here in self._unused_path(checkpoint):
                if here in found.counted:
                    break
                found.counted[here] = here.replay_tokens
                found.num_tokens += here.replay_tokens
                num_looks += 1
        if not ahead:
            turn.last = found

    def _unused_path(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """This checkpoint and those above it, up to where pages are in use anyway."""
        here: Checkpoint | None = checkpoint
        while here is not None:
            if not here.node.is_root and self._pages.live_refs(here.node.page):
                return
            yield here
            here = here.above
