"""Ids of a trace's blocks, numbered by first use."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from milepost.errors import TraceError

_NONE = 2**32 - 1
"""Stands for the id before a prompt's first."""


class PageIds:
    """Numbers of a trace's ids, by first use, and the id that each follows."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._before = array("I")
        """Number -> number of the id before it, or `_NONE`."""

    def __len__(self) -> int:
        return len(self._before)

    def of(self, given: Any, where: str) -> array[int]:
        """Returns the numbers of one prompt's ids. Raises TraceError."""
        if not isinstance(given, list):
            raise TraceError(f"{where}: hash_ids is not a list")
        try:
            return array("I", self._numbered(given, where))
        except TypeError as error:
            raise TraceError(f"{where}: hash_ids holds something that is not an id") from error

    def _numbered(self, given: list[Any], where: str) -> Iterator[int]:
        before = _NONE
        for id_ in given:
            number = self._numbers.get(id_)
            if number is None:
                number = self._numbers[id_] = len(self._before)
                self._before.append(before)
            elif self._before[number] != before:
                raise TraceError(
                    f"{where}: hash_ids: {str(id_)[:40]} follows another id than the first time: "
                    "an id stands for its block and everything before it"
                )
            before = number
            yield number
