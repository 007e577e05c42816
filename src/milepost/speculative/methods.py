"""Combines several drafters: each request uses the first that has drafts."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import Drafter, DraftWish


class FirstOf:
    """Asks `drafters` in turn, each only for the requests that earlier ones had no drafts for."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        assert drafters, "somebody drafts"
        self._drafters = drafters
        self.method = ", ".join(drafter.method for drafter in drafters)

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(wishes)
        open_ = list(range(len(wishes)))
        for drafter in self._drafters:
            drafts = drafter.propose([wishes[index] for index in open_])
            for index, tokens in zip(open_, drafts, strict=True):
                found[index] = tokens
            open_ = [index for index in open_ if not found[index]]
            if not open_:
                break
        return found

    def is_ready(self, request: Request) -> bool:
        return any(drafter.is_ready(request) for drafter in self._drafters)

    def forget(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.forget(request)
