"""How much of the cache is likely to be needed soon: what a request displaces, if it is admitted,
costs others their hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from milepost.cache.eviction.score import Score
from milepost.cache.memory import Storage
from milepost.cache.tree import Checkpoint, Tree, upwards

LOOK_AHEAD = 256
"""Requests within which somebody is likely to ask for what counts, and for whose growth a newcomer
leaves room.
"""

LOOKS_A_CHANGE = 64
"""Checkpoints that may be looked at for each change of the cache since the last look. That is a
quarter of what an admission takes to plan. With one look for all that a step admits, and with what
each takes away taken off instead, agents lost 1 to 2 points of hits in the cells tried.
"""

MAX_LOOKS = 1024
"""Checkpoints that are looked at in one go, about a millisecond. Of more of them some are as they
were at the last look: it is an estimate in any case. But where all are old, requests are let in
whose pages others will want at once.
"""


@dataclass(slots=True)
class Likely:
    """Cached slots of the deepest checkpoints whose return is likely, and the pages of what they
    build on.
    """

    num_slots: int = 0
    num_tokens: int = 0
    counted: dict[Checkpoint, int] = field(default_factory=dict)
    """Tokens behind the next shallower one, for each whose pages are not in use."""


class Held(NamedTuple):
    """What is cached and likely to be asked for soon."""

    num_pages: int
    num_slots: int


class HoldBack:
    """Goes round the checkpoints; a round takes several changes of the cache if there are many."""

    def __init__(self, tree: Tree, storage: Storage, score: Score, page_size: int) -> None:
        self._tree = tree
        self._score = score
        self._pages = storage.pages
        self._slots = storage.slots
        self._page_size = page_size
        self._version = -1
        self._ahead: list[Checkpoint] = []
        self._found = Likely()
        self._last: Likely | None = None
        """What the round before has found."""

    def beside(self, own: Checkpoint | None, version: int) -> Held:
        """Cached pages and slots that are likely to be asked for soon, in a cache of this version,
        without the pages of the checkpoint `own` and those above it.
        """
        if self._version != version:
            num_looks = min((version - self._version) * LOOKS_A_CHANGE, MAX_LOOKS)
            self._version = version
            self._go_on(num_looks)
        expected = self._last if self._last is not None else self._found
        num_tokens = expected.num_tokens
        for here in upwards(own):
            num_tokens -= expected.counted.get(here, 0)
        num_pages = min(num_tokens // self._page_size, self._pages.num_cached)
        return Held(num_pages, min(expected.num_slots, self._slots.num_cached))

    def _go_on(self, most: int) -> None:
        """Look at so many of the next checkpoints; at all of them anew, if they are no more."""
        at_slot, score = self._tree.at_slot, self._score
        live_slots, live_pages = self._slots.live_refs, self._pages.live_refs
        if not self._ahead or most >= len(at_slot):
            self._ahead, self._found = list(at_slot.values()), Likely()
        ahead, found, num_looks = self._ahead, self._found, 0
        while ahead and num_looks < most:
            checkpoint = ahead.pop()
            num_looks += 1
            slot = checkpoint.slot
            is_kept = at_slot.get(slot) is checkpoint
            if not is_kept or checkpoint.below or live_slots(slot):
                continue
            if not score.is_expected(checkpoint, LOOK_AHEAD):
                continue
            found.num_slots += 1
            for here in upwards(checkpoint):
                node = here.node
                if here in found.counted or (not node.is_root and live_pages(node.page)):
                    break  # it counts already, or its pages are in use anyway
                found.counted[here] = here.replay_tokens
                found.num_tokens += here.replay_tokens
                num_looks += 1
        if not ahead:
            self._last = found
