"""Reasoning between two tags, or two sentences that serve as tags.

Where the template's generation prompt opens the reasoning, the answer has only the closing tag.
Line breaks beside the tags belong to neither side. If reasoning is never closed, there is nothing
else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.tape import Reading, Tape, run, spaces, tags, take, until

_LINES = re.compile(r"\n*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTags:
    """Tags of a family."""

    open: str = "<think>"
    close: str = "</think>"
    others: tuple[tuple[str, str], ...] = ()
    """Further pairs that mean the same, of which any opening goes with any closing one."""
    is_always_open: bool = False
    """Whether an answer begins inside the reasoning whatever its prompt says."""
    signs: tuple[str, ...] = ("</think>",)

    @property
    def opens(self) -> tuple[str, ...]:
        return self.open, *(opening for opening, _ in self.others)

    @property
    def closes(self) -> tuple[str, ...]:
        return self.close, *(closing for _, closing in self.others)

    def is_open_in(self, prompt: str, begun: str = "") -> bool:
        """Whether an answer to this prompt begins inside the reasoning; the prompt ends with what
        is `begun` of it."""
        opened, closed = (max(map(begun.rfind, own)) for own in (self.opens, self.closes))
        if opened != closed:
            return opened > closed
        return self.is_always_open or prompt[-1024:].rstrip().endswith(self.open)

    def read(
        self, tape: Tape, found: FoundEvents, *, is_open: bool, ends: tuple[str, ...]
    ) -> Reading[None]:
        """Read the reasoning with which an answer begins, if it does.

        `is_open` if the prompt opened it. Models forget to close it before a call: so a tag of
        `ends` at the beginning of a line ends it too, and is left to be read.
        """
        before = yield from spaces(tape)
        is_named = yield from take(tape, tags(*self.opens))
        if not is_named and not is_open:
            found.content(before)
            return
        text = _Lines(found)
        text.give("" if is_named else before)
        marks = tags(*self.closes, *ends)
        while mark := (yield from until(tape, marks, text.give)):
            if mark in self.closes:
                yield from run(tape, _LINES)
                return
            if text.is_new:
                tape.unread(mark)
                return
            text.give(mark)
        text.end()


class _Lines:
    """Passes reasoning on, without line breaks at its start; those at its end wait."""

    def __init__(self, found: FoundEvents) -> None:
        self._found = found
        self._held: list[str] = []
        self._has_text = False

    @property
    def is_new(self) -> bool:
        """Whether a line begins here."""
        return bool(self._held) or not self._has_text

    def give(self, text: str) -> None:
        text = text if self._has_text else text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self._found.reasoning("".join(self._held) + kept)
            self._held.clear()
            self._has_text = True
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def end(self) -> None:
        self._found.reasoning("".join(self._held))
