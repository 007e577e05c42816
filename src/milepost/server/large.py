"""Runs work on large requests in a thread, so that the event loop can answer others meanwhile.

Such work is made of calls that hold the interpreter lock, tens of milliseconds each. One thread
does all of it: several would have the loop wait for several of these calls in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from milepost.engine.text import MAX_SHORT, Lane

T = TypeVar("T")

_PART_SIZE = 256
"""Size of a message or a part besides its text, in characters that take as long to read."""


class LargeWork:
    """The thread of one server. `close` it at the end."""

    def __init__(self) -> None:
        self._lane = Lane("large-requests")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Returns the result of `work`: at once if its size in characters is small, otherwise in
        the thread, after work that is smaller and came earlier."""
        return work() if size <= MAX_SHORT else await self._lane.run(work, size)

    def close(self) -> None:
        """Starts no further work."""
        self._lane.close()


def size_of(messages: Sequence[Any] | None) -> int:
    """Returns the size of work on each message and part of a conversation, whatever their text."""
    count = 0
    for message in messages or ():
        content = getattr(message, "content", None)
        count += 1 + (len(content) if isinstance(content, list) else 0)
    return _PART_SIZE * count
