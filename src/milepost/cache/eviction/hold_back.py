"""Estimates how much of the cache is likely to be asked for soon: a request that displaces some of
it costs others their hits.
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
"""Paths looked at for each change of the cache since the last look: a quarter of what an admission
takes to plan.
"""

MAX_LOOKS = 1024
"""Paths looked at in one go, about a millisecond. If there are more, what is known of some is as
old as the last round.
"""


@dataclass(slots=True)
class Likely:
    """Cached slots at the ends of likely paths, and the tokens of those paths."""

    num_slots: int = 0
    num_tokens: int = 0
    counted: dict[Checkpoint, int] = field(default_factory=dict)
    """Tokens after the next shallower one, for each checkpoint whose pages are not in use."""


class Held(NamedTuple):
    """Cached pages and slots that are likely to be asked for soon."""

    num_pages: int
    num_slots: int


class HoldBack:
    """Goes through the paths in rounds; a round takes several changes of the cache if there are
    many.
    """

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
        """Result of the last full round."""

    def beside(self, own: Checkpoint | None, version: int) -> Held:
        """Cached pages and slots that are likely to be asked for soon, in a cache of this version,
        without the pages of the checkpoint `own` and those above it.
        """
        if self._version != version:
            num_looks = min((version - self._version) * LOOKS_A_CHANGE, MAX_LOOKS)
            self._version = version
            self._go_on(num_looks)
        likely = self._last or self._found
        num_tokens = likely.num_tokens - sum(likely.counted.get(c, 0) for c in upwards(own))
        num_pages = min(num_tokens // self._page_size, self._pages.num_cached)
        return Held(num_pages, min(likely.num_slots, self._slots.num_cached))

    def _go_on(self, most: int) -> None:
        """Look at the next `most` paths; if there are no more than that, at all of them."""
        at_slot, live_refs = self._tree.at_slot, self._slots.live_refs
        if not self._ahead or most >= len(at_slot):
            self._ahead, self._found = list(at_slot.values()), Likely()
        ahead, num_looks = self._ahead, 0
        while ahead and num_looks < most:
            checkpoint = ahead.pop()
            is_kept = at_slot.get(checkpoint.slot) is checkpoint
            if is_kept and not checkpoint.below and not live_refs(checkpoint.slot):
                num_looks += 1 + self._count(checkpoint)
        if not ahead:
            self._last = self._found

    def _count(self, checkpoint: Checkpoint) -> int:
        """Add a path by its deepest checkpoint if it is likely to be asked for; returns how many
        checkpoints were added.
        """
        if not self._score.is_expected(checkpoint, LOOK_AHEAD):
            return 0
        found, live_pages, num_before = self._found, self._pages.live_refs, len(self._found.counted)
        found.num_slots += 1
        for here in upwards(checkpoint):
            node = here.node
            if here in found.counted or (not node.is_root and live_pages(node.page)):
                break  # it counts already, or its pages are in use anyway
            found.counted[here] = here.replay_tokens
            found.num_tokens += here.replay_tokens
        return len(found.counted) - num_before
