"""Finds where a value ends that is read as a whole, and passes on its source."""

from __future__ import annotations

from milepost.server.parsing.strings import QUOTES, Give, TextLine
from milepost.server.parsing.tape import Reading, Tape, is_token, one, tags, take, until

_BRACKETS = (*"([{", *")]}")


def bracketed(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """Pass on a value in brackets; whether it ended, before one of `ends` (not read)."""
    return bool((yield from _scan(tape, give, ends, "")))


def argument(tape: Tape, give: Give, ends: tuple[str, ...]) -> Reading[bool]:
    """Pass on a value up to the comma or bracket behind it; whether it ended there."""
    return bool((yield from _scan(tape, give, ends, ",)]}")))


def _scan(tape: Tape, give: Give, ends: tuple[str, ...], stops: str) -> Reading[str]:
    """Pass on a text up to one of `stops` outside of brackets (not read); without any, up to the
    end of the bracket that begins it. Returns the mark that ended it, "" if none did."""
    marks = tags(*QUOTES, *_BRACKETS, *("," if stops else ""), *ends)
    line = TextLine(give)
    depth = 0
    while mark := (yield from until(tape, marks, line.give)):
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
    """Pass on a string behind its opening quote; whether it ended."""
    closing = quote
    if (yield from take(tape, tags(quote))):
        line.give(quote)
        if not (yield from take(tape, tags(quote))):
            return True
        line.give(quote)
        closing = quote * 3
    marks = tags(closing, "\\", *ends)
    while mark := (yield from until(tape, marks, line.give)):
        if mark in ends and (is_token(mark) or line.is_new):
            tape.unread(mark)
            return False
        line.give(mark)
        if mark == closing:
            return True
        if mark == "\\":
            line.give((yield from one(tape)))
    return False
