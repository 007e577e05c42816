"""Calls in a section, each with its name before its JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>
    {"a": 1}<|tool_call_end|><|tool_calls_section_end|>

The text before the arguments is also the call's id, which the model's template writes back, so
clients get it as the id. Arguments stream. A section's tags may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.json_text import value
from milepost.server.parsing.tape import Reading, Tape, peek, run, spaces, tags, take, until

MAX_ID_LEN = 1024
_ID = re.compile(r"[^<]*")
_NUMBER = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Tags of a family."""

    open: str
    close: str
    call: tuple[str, str]
    arguments: str
    """Between a call's id and its arguments."""
    prefix: str
    """Before the name in an id; a number follows the name."""
    signs: tuple[str, ...]

    def reader(self, tools: lark.Tools) -> _NamedReader:
        return _NamedReader(self, tools)

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        """Rules of which `calls` is the whole."""
        names = [f"tool{i}" for i in range(len(tools))]
        rules = [self._rule(name, tool, tag) for name, tool in zip(names, tools, strict=True)]
        return [
            f"calls: {tag(self.open)} call{'' if is_single else '+'} {tag(self.close)}",
            f"call: {tag(self.call[0])} ({' | '.join(names)}) {tag(self.call[1])}",
            "number: /[0-9]{1,4}/",
            *rules,
        ]

    def _rule(self, rule: str, tool: Mapping[str, Any], tag: lark.Tag) -> str:
        head = lark.text(f"{self.prefix}{tool['function']['name']}:")
        arguments = lark.json_value(lark.parameters(tool), is_strict=lark.is_strict(tool))
        return f"{rule}: {head} number {tag(self.arguments)} {arguments}"


class _NamedReader:
    """Reads the calls of one answer."""

    def __init__(self, form: NamedCalls, tools: lark.Tools) -> None:
        self._form = form
        self._names = {tool["function"]["name"] for tool in tools}
        self.starts = (form.open, form.call[0])
        self.close = form.close

    def read(self, tape: Tape, found: FoundEvents, start: str) -> Reading[bool]:
        form = self._form
        seen, begun = start, start == form.call[0]
        if not begun:
            seen += yield from spaces(tape)
            mark = yield from take(tape, tags(form.call[0]))
            seen, begun = seen + mark, bool(mark)
        num_calls = 0
        while begun:
            id_ = yield from run(tape, _ID, MAX_ID_LEN)
            mark = "" if len(id_) > MAX_ID_LEN else (yield from take(tape, tags(form.arguments)))
            name = self._name(id_.strip())
            if not mark or not name:
                found.content(seen + id_ + mark)
                return num_calls > 0
            num_calls += 1
            found.start(name, id_.strip())
            if not (yield from self._arguments(tape, found)):
                return True
            found.end_call()
            seen = yield from spaces(tape)
            begun = bool((yield from take(tape, tags(form.call[0]))))
            seen += form.call[0]
        if not num_calls:
            found.content(seen)
        return num_calls > 0

    def _name(self, id_: str) -> str:
        name = _NUMBER.sub("", id_)
        bare = name.removeprefix(self._form.prefix)
        return name if name in self._names and bare not in self._names else bare

    def _arguments(self, tape: Tape, found: FoundEvents) -> Reading[bool]:
        """Pass on what is an object, as it comes; whether the call ended."""
        end = tags(self._form.call[1])
        yield from spaces(tape)
        pieces: list[str] = []
        if (yield from peek(tape, tags("{"))):
            if not (yield from value(tape, found.arguments, (self._form.call[1],))):
                return bool((yield from take(tape, end)))
        else:
            mark = yield from until(tape, end, pieces.append)
            found.arguments("".join(pieces).strip() or "{}")
            return bool(mark)
        return bool((yield from until(tape, end, pieces.append)))
