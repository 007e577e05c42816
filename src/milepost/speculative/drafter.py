"""The interface of all drafters."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Forgets a request that is over. Its answer is whole by then, and may be one for which
        nothing was drafted."""
        ...
