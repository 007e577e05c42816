"""What every drafter is asked, whatever it drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from milepost.scheduler.request import Request


class DraftWish(msgspec.Struct, frozen=True):
    """For one running request, all of whose tokens are known: how many drafts at most."""

    request: Request
    most: int


class Drafter(Protocol):
    """Tells what may follow the tokens of requests. What it says changes no answer, only how fast
    it comes.
    """

    method: str
    """Its name in `--speculative-config`."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        """For each wish the likeliest tokens behind the request's last, up to `most`; none where it
        has no idea. Called between two steps, with requests that no step in flight computes for.
        """
        ...

    def is_ready(self, request: Request) -> bool:
        """Whether there will be drafts behind the token that a step in flight samples, as far as
        can be told without it."""
        ...

    def forget(self, request: Request) -> None:
        """A request is over: its answer is whole. Also for those that nothing was drafted for."""
        ...
