"""Events that parsers return, and the interface of all readers of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from milepost.server.parsing.strings import Give
from milepost.server.parsing.tape import Reading, Tape


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; the CallArguments that follow belong to it."""

    name: str
    id: str = ""
    """The model's own id of the call; "" in formats without ids and for an id that it has used
    before."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the current call's arguments, as JSON text."""

    text: str


Event = Reasoning | Content | CallStart | CallArguments


class FoundEvents:
    """Collects the events of one answer; neighbours of one kind become one event.

    White space next to a call belongs neither to it nor to the content, so white space at either
    end of the content waits.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[type[Event], str]] = []
        self._ids: list[str] = []
        """Ids of the calls among the pieces."""
        self._all_ids: set[str] = set()
        self._spaces: list[str] = []
        self._has_calls = self._has_content = False
        self.has_ended_call = False
        """Whether a call has ended."""
        self.is_cut = False
        """Whether the answer was cut off. Text that is found then may be the beginning of a
        call."""

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def content(self, text: str) -> None:
        if self.is_cut and self._has_calls:
            return  # a further call that was cut off: neither a call nor content
        length = len(text.rstrip())
        if length:
            if self._has_calls and not self._has_content:
                self._spaces.clear()
                text = text.lstrip()
                length = len(text.rstrip())
            self._add(Content, "".join(self._spaces) + text[:length])
            self._spaces.clear()
            self._has_content = True
        if length < len(text):
            self._spaces.append(text[length:])

    def plain(self, text: str) -> None:
        """Adds content at once, since no call can follow it any more."""
        self._add(Content, "".join(self._spaces) + text)
        self._spaces.clear()

    def start(self, name: str, id_: str = "") -> None:
        self.end_call()
        self._has_calls = True
        self._ids.append("" if id_ in self._all_ids else id_)
        self._all_ids.add(id_)
        self._pieces.append((CallStart, name))

    def end_call(self) -> None:
        self._spaces.clear()
        self._has_content = False
        self.has_ended_call = self._has_calls

    def arguments(self, text: str) -> None:
        self._add(CallArguments, text)

    def end(self) -> None:
        """Ends the answer. White space at its end is content, except after a call."""
        if self._has_content or not self._has_calls:
            self.plain("")

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        events: list[Event] = []
        ids = iter(self._ids)
        start = 0
        for place, (kind, _) in enumerate(self._pieces):
            following = self._pieces[place + 1 : place + 2]
            if kind is not CallStart and following and following[0][0] is kind:
                continue
            text = "".join(text for _, text in self._pieces[start : place + 1])
            events.append(CallStart(text, next(ids)) if kind is CallStart else kind(text))
            start = place + 1
        self._pieces.clear()
        self._ids.clear()
        return events

    def _add(self, kind: type[Event], text: str) -> None:
        if text:
            self._pieces.append((kind, text))


IsKnown = Callable[[str], bool]
"""Returns whether a function may be called."""


class CallReader(Protocol):
    """Reads the calls of one answer."""

    starts: tuple[str, ...]
    """Tags that may begin a call; the usual one comes first."""
    close: str
    names: frozenset[str]
    """Names of the functions in the request."""

    def read(
        self, tape: Tape, found: FoundEvents, start: str, aside: Give, is_known: IsKnown
    ) -> Reading[bool]:
        """Reads on after a tag of `starts` and returns whether it was a call. A call is announced
        as soon as it is known to be one; other text goes to `aside`."""


def any_name(name: str) -> bool:  # noqa: ARG001
    """Accepts every function, listed or not."""
    return True
