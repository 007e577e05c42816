"""A stand-in for standard error that hands on what is written, line by line."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any, TextIO

MAX_CHARS = 2**16
"""A longer line is cut into several."""


class StrayText(io.TextIOBase):
    """Calls `say("%s", line)` for each line. What is drawn over again on a terminal, such as a
    progress bar, is left out. `stream` is what stood here before.

    Nothing that `say` itself writes comes back: then the text is dropped, as it has nowhere to go.
    """

    def __init__(self, stream: TextIO, say: Callable[..., object]) -> None:
        self.stream = stream
        self._say = say
        self._own = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        own: Any = self._own
        if getattr(own, "is_saying", False):
            return len(text)
        *lines, rest = (getattr(own, "rest", "") + text).split("\n")
        if len(rest) > MAX_CHARS:
            lines, rest = [*lines, rest], ""
        own.rest, own.is_saying = rest, True
        try:
            for line in lines:
                shown = line.rstrip("\r").rpartition("\r")[2]
                if shown.strip():
                    self._say("%s", shown)
        finally:
            own.is_saying = False
        return len(text)
