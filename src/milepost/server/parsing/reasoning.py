"""Reasoning between two tags, or two sentences that serve as tags.

If the template's generation prompt opens the reasoning, the answer has only the closing tag. Line
breaks next to the tags belong to neither side. Models forget to close reasoning before a call, so a
call of a function in the request ends it too, wherever it begins. If neither comes, the whole
answer is reasoning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from milepost.server.parsing.events import CallReader, CallSite, FoundEvents, any_name
from milepost.server.parsing.strings import TextLine
from milepost.server.parsing.tape import Reading, Tape, is_token

_LINES = re.compile(r"\n*")
_QUOTES = ("`", "'", '"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTags:
    """Tags of a family."""

    open: str = "<think>"
    close: str = "</think>"
    others: tuple[tuple[str, str], ...] = ()
    """Further pairs with the same meaning. Any opening tag may be closed by any closing one."""
    is_always_open: bool = False
    """Whether an answer begins inside the reasoning unless its prompt ends with a closing tag."""
    signs: tuple[str, ...] = ("</think>",)

    @property
    def opens(self) -> tuple[str, ...]:
        return self.open, *(opening for opening, _ in self.others)

    @property
    def closes(self) -> tuple[str, ...]:
        return self.close, *(closing for _, closing in self.others)

    def is_open_in(self, prompt: str, begun: str = "") -> bool:
        """Returns whether an answer to this prompt begins inside the reasoning. The prompt ends
        with `begun`, the beginning of the answer."""
        opened, closed = (max(map(begun.rfind, tags)) for tags in (self.opens, self.closes))
        if opened != closed:
            return opened > closed
        end = prompt.removesuffix(begun)[-1024:].rstrip()
        if self.is_always_open:
            return not end.endswith(self.closes)
        return end.endswith(self.open)

    def read(
        self, tape: Tape, found: FoundEvents, calls: CallReader | None, *, is_open: bool
    ) -> Reading[bool]:
        """Reads the reasoning at the start of an answer, if there is any, and returns whether a
        call ended it. `is_open` says that the prompt opened it."""
        before = yield from tape.spaces()
        mark = yield from tape.take(*self.opens, *self.closes)
        if mark in self.closes:
            yield from lines(tape)
            return False
        if not mark and not is_open:
            found.content(before)
            return False
        text = TextLine(found.reasoning, "\n")
        if mark:
            yield from lines(tape)
        else:
            text.give(before.lstrip("\n"))
        starts = () if calls is None else (calls.starts[0], *filter(is_token, calls.starts[1:]))
        while mark := (yield from tape.until(text.give, *self.closes, *starts)):
            if mark in self.closes:
                yield from lines(tape)
                return False
            is_quoted = not text.is_new and text.last in _QUOTES
            if calls is None or (is_quoted and not is_token(mark)):
                text.give(mark)
                continue
            is_known = any_name if is_token(mark) else calls.names.__contains__
            if (yield from calls.read(mark, CallSite(tape, found, text.give, is_known))):
                return True
        text.release()
        return False


def lines(tape: Tape) -> Reading[str]:
    """Reads line breaks after a tag."""
    return (yield from tape.run(_LINES))
