"""Reads strings as models write them, in JSON or in Python.

A string may contain the tags that end its call. But models also leave strings open; then the tag
that ends the call follows a line break, and JSON strings contain no line breaks. A tag that is a
special token ends a string wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from milepost.server.parsing.tape import Reading, Tape, is_token

Give = Callable[[str], None]

QUOTES = ('"', "'")
_SHORT = '"\\/bfnrt'
_HEX, _OCTAL = "0123456789abcdefABCDEF", "01234567"
_OWN = {"a": "\\u0007", "v": "\\u000b", "\n": ""}
"""Python's escapes that JSON does not have."""


class TextLine:
    """Passes a text on; a line break at its end waits, together with the white space after it.

    White space is everything in `blank`, by default what Python takes for it.
    """

    def __init__(self, give: Give, blank: str | None = None) -> None:
        self._give, self._blank = give, blank
        self._held: list[str] = []
        self.last = ""
        """The last character that is not white space."""

    @property
    def is_new(self) -> bool:
        """Whether a new line begins here."""
        return bool(self._held)

    def give(self, text: str) -> None:
        end = len(text.rstrip(self._blank))
        if end:
            self.release()
            self.last = text[end - 1]
        if not self._held:
            line = text.find("\n", end)
            end = len(text) if line < 0 else line
        if end:
            self._give(text[:end])
        if end < len(text):
            self._held.append(text[end:])

    def release(self, *, without: str = "") -> None:
        """Passes on what waits, except `without` at its end."""
        if text := "".join(self._held).removesuffix(without):
            self._give(text)
        self._held.clear()


class StringReader:
    """Reads strings after their opening quotes, and passes them on as JSON."""

    def __init__(self, tape: Tape, give: Give, ends: tuple[str, ...], *, is_python: bool) -> None:
        self._tape = tape
        self._give = give
        self._ends = ends
        self._is_python = is_python
        self.has_guessed = False

    def read(self, quote: str, *, is_raw: bool = False) -> Reading[bool]:
        """Returns whether the string ended by itself. In Python, several in a row are one."""
        self._give('"')
        while True:
            if not (yield from self._part(quote, is_raw=is_raw)):
                if not (self._tape.is_cut and self._tape.is_empty):
                    self._give('"')
                return False
            if not self._is_python:
                break
            gap = yield from self._tape.spaces()
            following = yield from self._tape.take(*QUOTES)
            if not following:
                self._tape.unread(gap)
                break
            quote, is_raw = following, False
        self._give('"')
        return True

    def _part(self, quote: str, *, is_raw: bool) -> Reading[bool]:
        """Reads one string up to its closing quotes."""
        tape, closing = self._tape, quote
        if (yield from tape.take(quote)):
            if not (yield from tape.take(quote)):
                return True
            closing = quote * 3
        line = TextLine(lambda text: self._plain(text, is_long=len(closing) > 1))
        while True:
            mark = yield from tape.until(line.give, closing, "\\", *self._ends)
            if mark == closing:
                line.release()
                return True
            if mark == "\\":
                line.release()
                self._give((yield from self._escape(quote, is_raw=is_raw)))
            elif mark and not (is_token(mark) or line.is_new):
                line.give(mark)
            else:
                tape.unread(mark)
                return False

    def _plain(self, text: str, *, is_long: bool) -> None:
        self.has_guessed |= not (is_long or self._is_python) and "\n" in text
        self._give(inside(text))

    def _escape(self, quote: str, *, is_raw: bool) -> Reading[str]:
        """Reads an escape after its backslash, and returns its JSON."""
        is_python = self._is_python or quote == "'"
        mark = yield from self._tape.one()
        if not mark:
            return ""
        if is_raw:
            return "\\\\" + inside(mark)
        if mark in _SHORT:
            return "\\" + mark
        if mark == "'":
            return mark
        if mark in "uxU":
            return (yield from self._code(mark))
        if is_python and mark in _OWN:
            return _OWN[mark]
        if is_python and mark in _OCTAL:
            digits = mark + (yield from self._digits(_OCTAL, 2))
            return inside(chr(int(digits, 8)))
        self.has_guessed |= not is_python
        return "\\\\" + inside(mark)

    def _code(self, mark: str) -> Reading[str]:
        length = {"x": 2, "u": 4, "U": 8}[mark]
        digits = yield from self._digits(_HEX, length)
        if len(digits) == length and mark != "U":
            return f"\\u{digits:0>4}"
        if len(digits) == length and int(digits, 16) <= 0x10FFFF:
            return json.dumps(chr(int(digits, 16)))[1:-1]
        self.has_guessed = True
        return f"\\\\{mark}{digits}"

    def _digits(self, kind: str, limit: int) -> Reading[str]:
        found = ""
        while len(found) < limit:
            digit = yield from self._tape.take(*kind)
            if not digit:
                break
            found += digit
        return found


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """Returns a text as it stands inside JSON's quotes."""
    return quoted(text)[1:-1]
