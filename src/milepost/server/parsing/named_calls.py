"""Calls in a section, each with its name before its JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>
    {"a": 1}<|tool_call_end|><|tool_calls_section_end|>

The text before the arguments is also the call's id, and the model's template writes it back, so
clients get it as the id. Arguments stream. The tags of the section and those that end a call may be
missing. A call whose arguments are not an object is not a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import CallSite
from milepost.server.parsing.literals import value
from milepost.server.parsing.scanning import object_of
from milepost.server.parsing.tape import Reading

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
    """The text between a call's id and its arguments."""
    prefix: str
    """The text before the name in an id; a number follows the name."""
    signs: tuple[str, ...]

    def reader(self, tools: lark.Tools) -> _NamedReader:
        return _NamedReader(self, tools)

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        rules = [self._rule(rule, tool, tag) for rule, tool in named.items()]
        return [
            f"calls: {tag(self.open)} call{'' if is_single else '+'} {tag(self.close)}",
            f"call: {tag(self.call[0])} ({' | '.join(named)}) {tag(self.call[1])}",
            "number: /[0-9]{1,4}/",
            *rules,
        ]

    def _rule(self, rule: str, tool: Mapping[str, Any], tag: lark.Tag) -> str:
        head = lark.text(f"{self.prefix}{tool['function']['name']}:")
        return f"{rule}: {head} number {tag(self.arguments)} {lark.arguments(tool)}"


class _NamedReader:
    def __init__(self, form: NamedCalls, tools: lark.Tools) -> None:
        self._form = form
        self.names = lark.names(tools)
        self.starts: tuple[str, ...] = (form.open, form.call[0])
        self.close = form.close
        self._ends = (*form.call[::-1], form.close, form.open)
        """Tags that end a call, or begin what follows it."""

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        form, tape, found = self._form, site.tape, site.found
        tape.keep(start)
        begun = start == form.call[0]
        if not begun:
            yield from tape.spaces()
            begun = bool((yield from tape.take(form.call[0])))
        while begun and (yield from self._call(site)):
            site.count()
            mark = yield from tape.until(found.content, *self._ends)
            if mark == form.call[1]:
                found.end_call()
                yield from tape.spaces()
                mark = yield from tape.take(form.call[0])
            begun = mark == form.call[0]
            if begun:
                tape.keep(mark)
            else:
                tape.unread(mark)
        return site.end()

    def _call(self, site: CallSite) -> Reading[bool]:
        """Reads one call after its opening tag, up to the end of its arguments."""
        tape, found = site.tape, site.found
        id_ = yield from tape.run(_ID, MAX_ID_LEN)
        if len(id_) > MAX_ID_LEN or not (yield from tape.take(self._form.arguments)):
            return False
        id_ = id_.strip()
        name = self._name(id_)
        if not name or not site.is_known(name):
            return False
        yield from tape.spaces()
        if (yield from tape.peek("{")):
            site.start(name, id_)
            yield from value(tape, found.arguments, self._ends, is_object=True)
            return True
        pieces: list[str] = []
        mark = yield from tape.until(pieces.append, *self._ends)
        tape.unread(mark)
        text = "".join(pieces).strip()
        arguments = object_of(text)
        if arguments is None or (not mark and (tape.is_cut or not text)):
            return False
        site.start(name, id_)
        found.arguments(arguments)
        return True

    def _name(self, id_: str) -> str:
        name = _NUMBER.sub("", id_)
        bare = name.removeprefix(self._form.prefix)
        return name if name in self.names and bare not in self.names else bare
