"""How much of the cache is likely to be asked for soon, and so is no room for a patient request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from milepost.cache.kinds import Path
from milepost.cache.storage import Storage
from milepost.cache.tree import Checkpoint, Tree
from milepost.cache.worth import Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Cached pages and slots of the deepest checkpoints whose return is likely, and the pages of
    what they build on.
    """

    num_tokens: int
    num_slots: int
    counted: dict[Checkpoint, int]
    """Tokens behind the next shallower one, for each whose pages are not in use."""


class Reserve:
    """Remembers what it found until the cache changes: many requests may ask in one step."""

    __slots__ = ("_found", "_page_size", "_pages", "_slots", "_tree", "_version", "_worth")

    def __init__(self, tree: Tree, storage: Storage, worth: Worth, page_size: int) -> None:
        self._tree = tree
        self._worth = worth
        self._pages = storage.pages
        self._slots = storage.slots.pool
        self._page_size = page_size
        self._version = -1
        self._found: dict[int, Expected] = {}

    def beside(self, own: Path, within: int, version: int) -> tuple[int, int]:
        """Cached pages and slots that are likely to be asked for within so many requests, without
        the pages of the path `own`, in a cache of this version.
        """
        if version != self._version:
            self._version = version
            self._found.clear()
        expected = self._found.get(within)
        if expected is None:
            expected = self._found[within] = self._expected(within)
        num_tokens = expected.num_tokens
        for node in own.nodes:
            for checkpoint in node.checkpoints.values():
                num_tokens -= expected.counted.get(checkpoint, 0)
        return num_tokens // self._page_size, expected.num_slots

    def _expected(self, within: int) -> Expected:
        num_slots = 0
        counted: dict[Checkpoint, int] = {}
        for checkpoint in self._tree.at_slot.values():
            if checkpoint.below or self._slots.live_refs(checkpoint.slot):
                continue
            if not self._worth.is_expected(checkpoint, within):
                continue
            num_slots += 1
            for here in self._unused_path(checkpoint):
                if here in counted:
                    break
                counted[here] = here.replay_tokens
        return Expected(num_tokens=sum(counted.values()), num_slots=num_slots, counted=counted)

    def _unused_path(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """This checkpoint and those above it, up to where pages are in use anyway."""
        here: Checkpoint | None = checkpoint
        while here is not None:
            if not here.node.is_root and self._pages.live_refs(here.node.page):
                return
            yield here
            here = here.above
