"""Passes on the drafts of the model's own head, which runs after a step's sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish


class HeadDrafter:
    """Holds the drafts made after the last step."""

    method = "mtp"

    def __init__(self) -> None:
        self._drafts: Mapping[int, Sequence[int]] = {}
        """Maps a request's number to the drafts that may follow its tokens."""

    def learn(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Replaces all earlier drafts by those of the latest step."""
        self._drafts = drafts

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._drafts.get(wish.request.number, ())[: wish.most] for wish in wishes]

    def is_ready(self, _request: Request) -> bool:
        """Always true: the head drafts after any token."""
        return True

    def forget(self, _request: Request) -> None:
        """Does nothing: the head keeps nothing per request."""
