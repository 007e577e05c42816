"""Estimates how much of the cache is likely to be asked for soon. A request that displaces some of
it costs others their hits."""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.cache.eviction.reclaim import Reclaimer
from milepost.cache.tree import Checkpoint, upwards

LOOK_AHEAD = 256
"""Number of requests to look ahead: what is likely to be asked for by then counts, and a newcomer
leaves room for what grows by then."""

LOOKS_A_CHANGE = 64
"""Number of paths looked at per change of the cache since the last look. That takes a quarter of
the time that planning an admission takes."""

MAX_LOOKS = 1024
"""Largest number of paths looked at in one go, about a millisecond. If there are more, some
estimates are as old as the last round."""


@dataclass(slots=True)
class Likely:
    """Number of cached slots at the ends of paths likely to be asked for, and the tokens of those
    paths."""

    num_slots: int = 0
    num_tokens: int = 0
    counted: dict[Checkpoint, int] = field(default_factory=dict)
    """Checkpoints whose pages are not in use -> tokens since the next shallower checkpoint."""


class HoldBack:
    """Finds the paths likely to be returned to, in rounds. If there are many, one round spans
    several changes of the cache."""

    def __init__(self, reclaimer: Reclaimer, page_size: int) -> None:
        self._at_slot = reclaimer.tree.at_slot
        self._score = reclaimer.score
        self._pages = reclaimer.storage.pages
        self._slots = reclaimer.storage.slots
        self._page_size = page_size
        self._version = -1
        self._ahead: list[Checkpoint] = []
        self._found = Likely()
        self._last: Likely | None = None
        """Result of the last full round."""

    def beside(self, own: Checkpoint | None, version: int) -> tuple[int, int]:
        """Returns the numbers of cached pages and of slots that are likely to be asked for soon,
        without the pages of the checkpoint `own` and of those above it. `version` is the cache's
        current version."""
        if self._version != version:
            num_looks = min((version - self._version) * LOOKS_A_CHANGE, MAX_LOOKS)
            self._version = version
            self._go_on(num_looks)
        likely = self._last or self._found
        num_tokens = likely.num_tokens - sum(likely.counted.get(c, 0) for c in upwards(own))
        num_pages = min(num_tokens // self._page_size, self._pages.num_cached)
        return num_pages, min(likely.num_slots, self._slots.num_cached)

    def _go_on(self, most: int) -> None:
        """Looks at the next `most` paths, or at all of them if there are no more than that."""
        at_slot, live_refs = self._at_slot, self._slots.live_refs
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
        """Counts a path, given by its deepest checkpoint, if it is likely to be asked for and no
        request runs there. Returns how many checkpoints were added."""
        if self._is_used(checkpoint) or not self._score.is_expected(checkpoint, LOOK_AHEAD):
            return 0
        found, num_before = self._found, len(self._found.counted)
        found.num_slots += 1
        for here in upwards(checkpoint):
            if here in found.counted or self._is_used(here):
                break
            found.counted[here] = here.replay_tokens
            found.num_tokens += here.replay_tokens
        return len(found.counted) - num_before

    def _is_used(self, checkpoint: Checkpoint) -> bool:
        """Whether a running request holds the page of a checkpoint, and so all pages before it."""
        node = checkpoint.node
        return not node.is_root and self._pages.live_refs(node.page) > 0
