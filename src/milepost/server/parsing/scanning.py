"""Reads values that are needed as a whole: finds where one ends, and what its text says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing.literals import ValueReader, value
from milepost.server.parsing.strings import QUOTES, Give, TextLine
from milepost.server.parsing.tape import Reading, Tape, is_token

_BRACKETS = (*"([{", *")]}")


def bracketed(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """Passes on a value in brackets, and returns whether it ended before one of `ends` (not
    read)."""
    return bool((yield from _scan(tape, give, ends, "")))


def argument(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """Passes on a value up to the comma or bracket after it, and returns whether it ended there."""
    return bool((yield from _scan(tape, give, ends, ",)]}")))


def _scan(tape: Tape, give: Give, ends: tuple[str, ...], stops: str) -> Reading[str]:
    """Passes on a text up to one of `stops` outside of brackets (not read), or without stops up to
    the end of the bracket that begins it. Returns the mark that ended it, "" if none did."""
    marks = (*QUOTES, *_BRACKETS, *("," if stops else ""), *ends)
    line = TextLine(give)
    depth = 0
    while mark := (yield from tape.until(line.give, *marks)):
        if mark in ends or (not depth and mark in stops):
            tape.unread(mark)
            break
        line.give(mark)
        if mark in QUOTES:
            if not (yield from _string(tape, line, mark, ends)):
                return ""
        elif mark in _BRACKETS:
            depth += 1 if mark in "([{" else -1
            if not depth and not stops:
                break
    line.release()
    return "" if mark in ends else mark


def _string(tape: Tape, line: TextLine, quote: str, ends: tuple[str, ...]) -> Reading[bool]:
    """Passes on a string after its opening quote, and returns whether it ended."""
    closing = quote
    if (yield from tape.take(quote)):
        line.give(quote)
        if not (yield from tape.take(quote)):
            return True
        line.give(quote)
        closing = quote * 3
    while mark := (yield from tape.until(line.give, closing, "\\", *ends)):
        if mark in ends and (is_token(mark) or line.is_new):
            tape.unread(mark)
            return False
        line.give(mark)
        if mark == closing:
            return True
        if mark == "\\":
            line.give((yield from tape.one()))
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """A value that a text holds."""

    json: str
    is_exact: bool
    """Whether it was a literal of JSON or Python, so that nothing was guessed."""
    is_whole: bool
    """Whether it ended by itself."""


def literal(text: str, *, is_python: bool = False, is_cut: bool = False) -> Literal | None:
    """Returns the value that a whole text holds, or None if there is none or the text goes on after
    it."""
    tape = Tape.of(text, is_cut=is_cut)
    pieces: list[str] = []
    reader = ValueReader(tape, pieces.append, (), is_python=is_python)
    is_whole = _result(reader.read())
    if tape.rest().strip() or not pieces:
        return None
    is_exact = is_whole and not reader.has_guessed
    return Literal(json="".join(pieces), is_exact=is_exact, is_whole=is_whole)


def object_of(text: str) -> str | None:
    """Returns the JSON of the object that a text holds, even inside a string, or None if it holds
    none. An empty text and null are an empty object."""
    for _ in range(2):
        text = text.strip()
        if text in ("", "null", "None"):
            return "{}"
        if text.startswith("{"):
            pieces: list[str] = []
            _result(value(Tape.of(text), pieces.append, (), is_object=True))
            return "".join(pieces)
        found = literal(text)
        inner = None if found is None else loaded(found.json)
        if not isinstance(inner, str) or not text.startswith(QUOTES):
            return None
        text = inner
    return None


def loaded(text: str) -> Any:
    """Returns the value of a JSON text, or None if it is invalid (or null)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _result(reading: Reading[bool]) -> bool:
    """Returns the result of a reading whose text is complete."""
    try:
        next(reading)
    except StopIteration as end:
        return bool(end.value)
    raise AssertionError("a reader waits for text that cannot come")
