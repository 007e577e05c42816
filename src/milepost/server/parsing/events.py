"""Events that parsers return, and the interface of all readers of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        self._events: list[tuple[Callable[[str], Event], list[str]]] = []
        """Each event's kind, with the pieces of its text."""
        self._ids: set[str] = set()
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
        if self._has_calls and not self._has_content and text.strip():
            self._spaces.clear()
            text = text.lstrip()
        if plain := text.rstrip():
            self.plain(plain)
            self._has_content = True
        self._spaces.append(text[len(plain) :])

    def plain(self, text: str) -> None:
        """Adds content at once, since no call can follow it any more."""
        self._add(Content, "".join(self._spaces) + text)
        self._spaces.clear()

    def start(self, name: str, id_: str = "") -> None:
        self.end_call()
        self._has_calls = True
        given_id = "" if id_ in self._ids else id_
        self._ids.add(id_)
        self._events.append((partial(CallStart, id=given_id), [name]))

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
        events = [kind("".join(pieces)) for kind, pieces in self._events]
        self._events.clear()
        return events

    def _add(self, kind: type[Event], text: str) -> None:
        if text and self._events and self._events[-1][0] is kind:
            self._events[-1][1].append(text)
        elif text:
            self._events.append((kind, [text]))


def any_name(name: str) -> bool:  # noqa: ARG001
    """Accepts every function, listed or not."""
    return True


@dataclass(slots=True)
class CallSite:
    """The context in which a reader reads calls: the text, the events found so far, and the
    handling of text that turns out to be no call."""

    tape: Tape
    found: FoundEvents
    aside: Give
    is_known: Callable[[str], bool] = any_name
    """Returns whether a function may be called."""
    num_calls: int = 0

    def start(self, name: str, id_: str = "") -> None:
        """Announces a call; its text that was kept is dropped."""
        self.tape.kept()
        self.found.start(name, id_)

    def count(self) -> None:
        """Counts a call. Further calls may have any name, and other text is content."""
        self.num_calls += 1
        self.aside, self.is_known = self.found.content, any_name

    def end(self) -> bool:
        """Passes on the text that was kept, and returns whether there was a call before it."""
        self.aside(self.tape.kept())
        return self.num_calls > 0


class CallReader(Protocol):
    """Reads the calls of answers to one request."""

    starts: tuple[str, ...]
    """Tags that may begin a call; the usual one comes first."""
    close: str
    names: frozenset[str]
    """Names of the functions in the request."""

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        """Reads on after a tag of `starts` and returns whether it was a call. A call is announced
        as soon as it is known to be one."""
