"""Finds where a JSON value ends, as it streams.

Tags inside strings belong to the strings. But models also leave strings open; then the tag that
ends the call follows a line break, which no JSON string can contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from milepost.server.parsing.tape import Reading, Tape, one, run, spaces, tags, take, until

Give = Callable[[str], None]

_SCALAR = re.compile(r'[^\s,:"{}\[\]<]*')


def value(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """Pass on the value that begins here; whether it ended by itself.

    It did not if the text is over, or if one of `ends` (not read) comes where none can be.
    """
    mark = yield from take(tape, tags("{", "[", '"'))
    give(mark)
    if mark == '"':
        return (yield from _string(tape, give, ends))
    if mark:
        return (yield from _nested(tape, give, ends))
    scalar = yield from run(tape, _SCALAR)
    give(scalar)
    return bool(scalar)


def member(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[str | None]:
    """Pass on a key, its colon and the white space behind both; the key, None if there is none."""
    pieces: list[str] = []
    mark = yield from take(tape, tags('"'))
    give(mark)
    if not mark or not (yield from _string(tape, pieces.append, ends)):
        give("".join(pieces))
        return None
    text = "".join(pieces)
    give(text + (yield from spaces(tape)))
    colon = yield from take(tape, tags(":"))
    give(colon + (yield from spaces(tape)))
    key = loaded('"' + text)
    return key if colon and isinstance(key, str) else None


def _nested(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """An array or object behind its opening bracket."""
    depth = 1
    marks = tags('"', "{", "}", "[", "]", *ends)
    while depth:
        mark = yield from until(tape, marks, give)
        if not mark or mark in ends:
            tape.unread(mark)
            return False
        give(mark)
        if mark != '"':
            depth += 1 if mark in "{[" else -1
        elif not (yield from _string(tape, give, ends)):
            return False
    return True


def _string(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """A string behind its opening quote, the closing one included."""
    line = _Line(give)
    marks = tags('"', "\\", *ends)
    while True:
        mark = yield from until(tape, marks, line.give)
        if not mark or (mark in ends and line.is_new):
            tape.unread(mark)
            return False
        line.give(mark)
        if mark == "\\":
            line.give((yield from one(tape)))
        elif mark == '"':
            return True


class _Line:
    """Passes text on, and knows whether the last line has nothing yet."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self.is_new = False

    def give(self, text: str) -> None:
        rest = text.rstrip(" \t\r")
        if rest:
            self.is_new = rest.endswith("\n")
        if text:
            self._give(text)


def loaded(text: str, *, strict: bool = True) -> Any:
    """The value of a JSON text; None for what is none (and for null)."""
    try:
        return json.loads(text, strict=strict, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
