"""Calls as JSON objects between two tags.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Arguments stream once the name is known. An object without a name is content, tags included. Several
objects between two tags, in a list or run together, are several calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.json_text import loaded, member, value
from milepost.server.parsing.tape import Reading, Tape, run, spaces, tags, take

_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Tags and keys of a family."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    """"" where the end of the answer closes."""
    others: tuple[str, ...] = ()
    """Further tags that open."""
    name: str = "name"
    arguments: str = "arguments"
    is_list: bool = False
    """Whether the tags hold a list of all calls, not one call."""
    layout: tuple[str, str] = ("\n", "\n")
    """What stands behind the opening and before the closing tag."""
    signs: tuple[str, ...] = ("<tool_call>",)

    def reader(self, tools: lark.Tools) -> _JsonReader:  # noqa: ARG002 - as other formats
        return _JsonReader(self)

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        """Rules of which `calls` is the whole."""
        names = [f"tool{i}" for i in range(len(tools))]
        rules = [self._rule(name, tool) for name, tool in zip(names, tools, strict=True)]
        one = f"({' | '.join(names)})"
        before, after = (lark.text(part) for part in self.layout)
        opened = f"{tag(self.open)} {before}"
        closed = f"{after} {tag(self.close)}" if self.close else after
        if self.is_list:
            more = "" if is_single else f'(", " {one})*'
            return [f'calls: {opened} "[" {one} {more} "]" {closed}', *rules]
        more = "" if is_single else '("\\n" call)*'
        return [f"calls: call {more}", f"call: {opened} {one} {closed}", *rules]

    def _rule(self, rule: str, tool: Mapping[str, Any]) -> str:
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        arguments = lark.json_value(lark.parameters(tool), is_strict=lark.is_strict(tool))
        head = f'{{"{self.name}": {name}, "{self.arguments}": '
        return f'{rule}: {lark.text(head)} {arguments} "}}"'


class _JsonReader:
    """Reads the calls of one answer."""

    def __init__(self, form: JsonCalls) -> None:
        self._form = form
        self.starts = (form.open, *form.others)
        self.close = form.close

    def read(self, tape: Tape, found: FoundEvents, start: str) -> Reading[bool]:
        seen = [start, (yield from spaces(tape))]
        seen.append((yield from take(tape, tags("["))))
        seen.append((yield from spaces(tape)))
        num_calls = 0
        while (yield from take(tape, tags("{"))):
            if not (yield from _JsonCall(self._form, tape, found, ["".join(seen)]).read()):
                return num_calls > 0
            num_calls += 1
            seen = [(yield from run(tape, _BETWEEN))]
        if num_calls == 0:
            found.content("".join(seen))
            return False
        yield from take(tape, tags("]"))
        return True


class _JsonCall:
    """Reads one object behind its opening brace."""

    def __init__(self, form: JsonCalls, tape: Tape, found: FoundEvents, seen: list[str]) -> None:
        self._form = form
        self._tape = tape
        self._found = found
        self._seen = [*seen, "{"]
        self._arguments: list[str] = []
        self._name: str | None = None
        self._has_arguments = self._has_begun = False

    def read(self) -> Reading[bool]:
        """Whether it is a call. What is none has become content."""
        is_whole = yield from self._members((self._form.close,) if self._form.close else ())
        if not self._has_begun and (self._name is None or not is_whole):
            self._found.content("".join(self._seen))
            return False
        if not self._has_begun:
            self._found.start(str(self._name))
            self._found.arguments("".join(self._arguments) or "{}")
        return True

    def _members(self, ends: tuple[str, ...]) -> Reading[bool]:
        """Whether the object ended by itself."""
        tape, form = self._tape, self._form
        while True:
            self._see((yield from run(tape, _BETWEEN)))
            if (yield from take(tape, tags("}"))):
                self._see("}")
                return True
            key = yield from member(tape, self._see, ends)
            if key is None:
                return False
            if key == form.name and self._name is None:
                is_whole = yield from self._read_name(ends)
            elif key in (form.arguments, "parameters") and not self._has_arguments:
                is_whole = yield from self._read_arguments(ends)
            else:
                is_whole = yield from value(tape, self._see, ends)
            if not is_whole:
                return False

    def _read_name(self, ends: tuple[str, ...]) -> Reading[bool]:
        pieces: list[str] = []
        is_whole = yield from value(self._tape, pieces.append, ends)
        self._see("".join(pieces))
        name = loaded("".join(pieces))
        self._name = name if isinstance(name, str) else None
        return is_whole and self._name is not None

    def _read_arguments(self, ends: tuple[str, ...]) -> Reading[bool]:
        self._has_arguments = True
        if (yield from take(self._tape, tags("{"))):
            self._tape.unread("{")
            if self._name is not None:
                self._found.start(self._name)
                self._has_begun = True
                return (yield from value(self._tape, self._found.arguments, ends))
        is_whole = yield from value(self._tape, self._arguments.append, ends)
        text = "".join(self._arguments)
        self._see(text)
        inner = loaded(text)
        if inner is None or isinstance(inner, str):  # null, or an object written as a string
            self._arguments = [inner or "{}"]
        return is_whole

    def _see(self, text: str) -> None:
        if not self._has_begun:
            self._seen.append(text)
