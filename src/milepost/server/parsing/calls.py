"""How calls are read, whatever their format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.strings import Give
from milepost.server.parsing.tape import Reading, Tape

IsKnown = Callable[[str], bool]
"""Whether a function may be what is called."""


class CallReader(Protocol):
    """Reads the calls of one answer."""

    starts: tuple[str, ...]
    """Tags with which a call may begin; the first as a rule."""
    close: str
    names: frozenset[str]
    """Of the functions that the request lists."""

    def read(
        self, tape: Tape, found: FoundEvents, start: str, aside: Give, is_known: IsKnown
    ) -> Reading[bool]:
        """Read on behind a tag of `starts`; whether it was a call, which is announced once that is
        known. What was none is passed `aside`."""


def any_name(name: str) -> bool:  # noqa: ARG001
    """Where any function may be called, listed or not."""
    return True
