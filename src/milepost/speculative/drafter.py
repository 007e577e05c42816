"""The interface of all drafters, and two that pass on others' drafts: those of the model's own
head, and those of the first of several drafters that has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from milepost.scheduler.request import Request


class DraftWish(msgspec.Struct, frozen=True):
    """Asks for drafts for one running request, all of whose tokens are known."""

    request: Request
    most: int


class Drafter(Protocol):
    """Predicts the next tokens of requests. A prediction never changes an answer, only how fast it
    comes."""

    method: str
    """The drafter's name in `--speculative-config`."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        """Returns for each wish the likeliest tokens after the request's last, up to `most`, or
        none if the drafter has no idea. It is called between two steps, with requests that no step
        in flight computes for."""
        ...

    def is_ready(self, request: Request) -> bool:
        """Whether there will be drafts after a token that is still being sampled by a step in
        flight, judged without knowing it."""
        ...

    def forget(self, request: Request) -> None:
        """Drops a request that is over. Its answer is complete by then; it may never have had
        drafts."""
        ...


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


class FirstOf:
    """Asks `drafters` in turn, each only for the requests that earlier ones had no drafts for."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        assert drafters, "somebody drafts"
        self._drafters = drafters
        self.method = ", ".join(drafter.method for drafter in drafters)

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        proposals: list[Sequence[int]] = [()] * len(wishes)
        open_ = list(range(len(wishes)))
        for drafter in self._drafters:
            drafts = drafter.propose([wishes[index] for index in open_])
            for index, tokens in zip(open_, drafts, strict=True):
                proposals[index] = tokens
            open_ = [index for index in open_ if not proposals[index]]
            if not open_:
                break
        return proposals

    def is_ready(self, request: Request) -> bool:
        return any(drafter.is_ready(request) for drafter in self._drafters)

    def forget(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.forget(request)
