"""Reads text that arrives in pieces, from left to right.

Parsers are generators: they `yield` when they need more text, and continue when it has arrived.
Text is dropped once it is read, and at most the beginning of a tag is kept waiting, so each
character costs the same, whatever the pieces and however long the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns T."""

SPACES = re.compile(r"\s*")


class Tape:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.is_over = self.is_cut = False
        """Whether no more text comes, and whether the answer was cut off."""
        self.work = 0
        """Number of characters looked at or moved so far."""

    @classmethod
    def of(cls, text: str, *, is_cut: bool = False) -> Tape:
        """Returns the tape of a complete text."""
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

    # --- reading, as far as the text has arrived --------------------------------------------------

    def read(self, length: int) -> str:
        """Reads the next characters; fewer at the end of the text."""
        text = self._text[self._at : self._at + length]
        self._read_to(self._at + len(text))
        return text

    def rest(self) -> str:
        """Returns the text that has not been read yet, and moves to the end."""
        return self.read(len(self._text) - self._at)

    def unread(self, tag: str) -> None:
        """Puts back the text that was read last, even if more has arrived since."""
        if self._at < len(tag):
            self._text, self._at = tag + self._text[self._at :], len(tag)
        self._at -= len(tag)
        if self._kept and tag:
            self._kept[-1] = self._kept[-1].removesuffix(tag)

    def keep(self, start: str = "") -> None:
        """Keeps what is read from now on, after `start`, which was read before."""
        self._kept = [start]

    def kept(self) -> str:
        """Returns what was kept, and stops keeping."""
        kept, self._kept = self._kept or (), None
        return "".join(kept)

    def may_start(self, *texts: str) -> bool:
        """Returns whether the rest is empty or an unfinished tag."""
        tags = _tags(*texts)
        rest = self._text[self._at : self._at + tags.longest]
        return not rest or bool(tags.begun.fullmatch(rest))

    # --- reading across pieces --------------------------------------------------------------------

    def until(self, give: Callable[[str], None], *texts: str) -> Reading[str]:
        """Passes on the text before a tag as it comes. Returns the tag, or "" at the end of the
        text."""
        tags = _tags(*texts)
        while True:
            before, tag = self._find(tags)
            if before:
                give(before)
            if tag or self.is_over:
                return tag
            yield

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """Reads what a pattern matches, maybe nothing; gives up beyond `limit`."""
        pieces: list[str] = []
        length = 0
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "the pattern of a run matches the empty text"
            self._read_to(match.end())
            pieces.append(match.group())
            length += len(pieces[-1])
            if not self.is_empty or self.is_over or (limit is not None and length > limit):
                return "".join(pieces)
            yield

    def spaces(self) -> Reading[str]:
        return (yield from self.run(SPACES))

    def peek(self, *texts: str) -> Reading[str]:
        """Returns the tag that comes next, or "", without reading it."""
        tags = _tags(*texts)
        while True:
            self.work += tags.longest
            match = tags.whole.match(self._text, self._at)
            if match or self.is_over or not self.may_start(*texts):
                return match.group() if match else ""
            yield

    def peek_one(self, texts: ManyTexts) -> Reading[str]:
        """Returns which of many texts comes next, or "", without reading it."""
        while True:
            rest = self._text[self._at : self._at + texts.longest]
            self.work += len(rest)
            found = texts.start_of(rest)
            if found or self.is_over or not texts.may_become(rest):
                return found
            yield

    def take(self, *texts: str) -> Reading[str]:
        """Reads the tag that comes next, and returns it, or ""."""
        return self.read(len((yield from self.peek(*texts))))

    def one(self) -> Reading[str]:
        """Reads a character. Returns "" at the end of the text."""
        while self.is_empty and not self.is_over:
            yield
        return self.read(1)

    def _find(self, tags: _Tags) -> tuple[str, str]:
        """Reads up to the end of the first tag, and returns (text before it, the tag).

        If there is no tag, reads everything that cannot begin one, and returns "" as the tag.
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
        return self.read(end - self._at), ""

    def _read_to(self, end: int) -> None:
        self.work += end - self._at
        if self._kept is not None and end > self._at:
            self._kept.append(self._text[self._at : end])
        self._at = end


class _Tags:
    """Texts to look for; none is the beginning of another."""

    def __init__(self, *texts: str) -> None:
        self.longest = max(map(len, texts))
        self.whole = re.compile("|".join(map(re.escape, texts)))
        begun = "|".join(filter(None, map(_beginnings, texts)))
        self.begun = re.compile(rf"(?:{begun})\Z" if begun else r"(?!)")
        """An unfinished tag at the end of the text."""


_tags = lru_cache(maxsize=256)(_Tags)


class ManyTexts:
    """A set of texts, even thousands: a regex would take seconds to compile. No text is the
    beginning of another."""

    def __init__(self, texts: Collection[str]) -> None:
        self._texts = sorted(texts)
        self.longest = max(map(len, texts), default=0)

    def start_of(self, rest: str) -> str:
        """Returns the text that `rest` begins with, or ""."""
        place = bisect_right(self._texts, rest)
        before = self._texts[place - 1] if place else ""
        return before if rest.startswith(before) else ""

    def may_become(self, rest: str) -> bool:
        """Returns whether `rest` is the beginning of one of the texts."""
        place = bisect_left(self._texts, rest)
        return place < len(self._texts) and self._texts[place].startswith(rest)


def is_token(tag: str) -> bool:
    """Returns whether a tag is spelled like a special token, which is never quoted in a text."""
    return tag.startswith("<|")


def _beginnings(text: str) -> str:
    """Returns a pattern of the proper beginnings of a text."""
    pattern = ""
    for character in reversed(text[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
