"""Passes on the drafts of the model's own head, which runs behind the sampling of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish


class HeadDrafter:
    """Knows what was drafted behind the last step."""

    method = "mtp"

    def __init__(self) -> None:
        self._drafts: Mapping[int, Sequence[int]] = {}
        """Request number -> what may follow its tokens."""

    def learn(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """What a step has drafted; what was drafted before stands no more."""
        self._drafts = drafts

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._drafts.get(wish.request.number, ())[: wish.most] for wish in wishes]

    def is_ready(self, _request: Request) -> bool:
        """It drafts behind any token."""
        return True

    def forget(self, _request: Request) -> None:
        """Nothing is kept."""
