"""Text that arrives in pieces, read from left to right.

Parsers are generators: they `yield` where they need more text, and continue when it has arrived.
Text that was read is dropped, and at most the beginning of a tag is kept waiting, so each character
costs the same, whatever the pieces and however long the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where text is missing; returns T."""

SPACES = re.compile(r"\s*")


class Tape:
    """The text that has come and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.is_over = self.is_cut = False
        """Whether no more text comes; and whether its writer had not come to the end."""
        self.work = 0
        """Characters looked at or moved so far."""

    @classmethod
    def of(cls, text: str, *, is_cut: bool = False) -> Tape:
        """A whole text."""
        tape = cls()
        tape.put(text)
        tape.is_over, tape.is_cut = True, is_cut
        return tape

    def put(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self.work += len(self._text)

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._text)

    def find(self, tags: Tags) -> tuple[str, str]:
        """Read up to the end of the first tag: (what is before it, the tag).

        Without a tag, what cannot be the beginning of one is read, and the tag is "".
        """
        match = tags.whole.search(self._text, self._at)
        if match:
            before = self._text[self._at : match.start()]
            self._read_to(match.end())
            return before, match.group()
        end = len(self._text)
        if not self.is_over:
            begun = tags.begun.search(self._text, max(self._at, end - tags.longest + 1))
            end = begun.start() if begun else end
            self.work += min(len(self._text) - self._at, tags.longest)
        before = self._text[self._at : end]
        self._read_to(end)
        return before, ""

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what a pattern (which may match nothing) matches here."""
        match = pattern.match(self._text, self._at)
        assert match is not None, "the pattern of a run matches the empty text"
        self._read_to(match.end())
        return match.group()

    def starts(self, tags: Tags) -> str | None:
        """The tag that comes next, not read; "" if none does, None if that cannot be told yet."""
        self.work += tags.longest
        match = tags.whole.match(self._text, self._at)
        if match:
            return match.group()
        return None if not self.is_over and self.may_start(tags) else ""

    def may_start(self, tags: Tags) -> bool:
        """Whether what is left is nothing, or an unfinished tag."""
        rest = self._text[self._at : self._at + tags.longest]
        return not rest or bool(tags.begun.fullmatch(rest))

    def read(self, length: int) -> str:
        """The next characters; fewer where the text ends."""
        text = self._text[self._at : self._at + length]
        self._read_to(self._at + len(text))
        return text

    def rest(self) -> str:
        """All that is left."""
        return self.read(len(self._text) - self._at)

    def unread(self, tag: str) -> None:
        """Put back what was read last."""
        self._at -= len(tag)
        if self._kept and tag:
            self._kept[-1] = self._kept[-1].removesuffix(tag)

    def keep(self, start: str = "") -> None:
        """Keep what is read from now on, behind `start`, which was."""
        self._kept = [start]

    def kept(self) -> str:
        """What was kept; nothing more is."""
        kept, self._kept = self._kept or (), None
        return "".join(kept)

    def _read_to(self, end: int) -> None:
        self.work += end - self._at
        if self._kept is not None and end > self._at:
            self._kept.append(self._text[self._at : end])
        self._at = end


class Tags:
    """Texts to look for; none begins another."""

    def __init__(self, *texts: str) -> None:
        self.longest = max(map(len, texts))
        self.whole = re.compile("|".join(map(re.escape, texts)))
        begun = "|".join(filter(None, map(_beginnings, texts)))
        self.begun = re.compile(rf"(?:{begun})\Z" if begun else r"(?!)")
        """An unfinished tag at the end of the text."""


@lru_cache(maxsize=256)
def tags(*texts: str) -> Tags:
    return Tags(*texts)


def is_token(tag: str) -> bool:
    """Whether a tag is spelled as a special token, which no text quotes."""
    return tag.startswith("<|")


def _beginnings(text: str) -> str:
    """A pattern of the proper beginnings of a text."""
    pattern = ""
    for character in reversed(text[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern


def until(tape: Tape, ends: Tags, give: Callable[[str], None]) -> Reading[str]:
    """Pass on what comes before a tag, as it comes; returns the tag, "" at the end of the text."""
    while True:
        before, tag = tape.find(ends)
        if before:
            give(before)
        if tag or tape.is_over:
            return tag
        yield


def run(tape: Tape, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
    """Read what a pattern matches, over the borders of pieces; gives up beyond `limit`."""
    pieces: list[str] = []
    length = 0
    while True:
        pieces.append(tape.run(pattern))
        length += len(pieces[-1])
        if not tape.is_empty or tape.is_over or (limit is not None and length > limit):
            return "".join(pieces)
        yield


def spaces(tape: Tape) -> Reading[str]:
    return (yield from run(tape, SPACES))


def peek(tape: Tape, options: Tags) -> Reading[str]:
    """The tag that comes next, or ""; nothing is read."""
    while (tag := tape.starts(options)) is None:
        yield
    return tag


def take(tape: Tape, options: Tags) -> Reading[str]:
    """Read the tag that comes next, if one does: the tag, or ""."""
    return tape.read(len((yield from peek(tape, options))))


def one(tape: Tape) -> Reading[str]:
    """Read a character; "" at the end of the text."""
    while tape.is_empty and not tape.is_over:
        yield
    return tape.read(1)
