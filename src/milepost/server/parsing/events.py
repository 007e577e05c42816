"""The events that parsers return, and how calls are read, whatever their format."""

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
    """A tool call begins; CallArguments that follow belong to it."""

    name: str
    id: str = ""
    """What the model itself calls the call, unless it has called another so; "" in formats without
    ids."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the current call's arguments, as JSON text."""

    text: str


Event = Reasoning | Content | CallStart | CallArguments


class FoundEvents:
    """The events of one answer; neighbours of one kind become one event.

    White space beside a call belongs to neither, so white space at an end of the content waits.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[type[Event], str]] = []
        self._ids: list[str] = []
        """Of the calls among the pieces."""
        self._all_ids: set[str] = set()
        self._spaces: list[str] = []
        self._has_calls = self._has_content = False
        self.has_ended_call = False
        """Whether a call has come to its end."""
        self.is_cut = False
        """Whether the answer was cut off. What is found then had waited: it may begin a call."""

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def content(self, text: str) -> None:
        if self.is_cut and self._has_calls:
            return  # the beginning of a further call, cut off: neither a call nor words
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
        """Content beside which no call can come any more, so nothing waits."""
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
        """The answer is over: white space at its end is content, but behind a call."""
        if self._has_content or not self._has_calls:
            self.plain("")

    def take(self) -> list[Event]:
        """What was found since the last time."""
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
