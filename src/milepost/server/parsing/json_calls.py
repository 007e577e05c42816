"""Calls as JSON objects between two tags.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Arguments stream once the name is known. An object without a name, or with arguments that are not an
object, is not a call, tags included. Several objects between two tags, in a list or one after the
other, are several calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import CallSite
from milepost.server.parsing.literals import value
from milepost.server.parsing.scanning import loaded, object_of
from milepost.server.parsing.strings import QUOTES
from milepost.server.parsing.tape import Reading

_BETWEEN = re.compile(r"[\s,]*")
_REST = re.compile(r"[\s,}\]]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Tags of a family."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    """The closing tag; "" if only the end of the answer closes."""
    others: tuple[str, ...] = ()
    """Further opening tags."""
    is_list: bool = False
    """Whether the tags enclose a list of all calls rather than one call."""
    layout: tuple[str, str] = ("\n", "\n")
    """Text after the opening and before the closing tag."""
    signs: tuple[str, ...] = ("<tool_call>",)

    def reader(self, tools: lark.Tools) -> JsonReader:
        return JsonReader(self, lark.names(tools))

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        rules = [self._rule(rule, tool) for rule, tool in named.items()]
        one = f"({' | '.join(named)})"
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
        head = f'{{"name": {name}, "arguments": '
        return f'{rule}: {lark.text(head)} {lark.arguments(tool)} "}}"'


class JsonReader:
    def __init__(self, form: JsonCalls, names: frozenset[str]) -> None:
        self._form = form
        self.names = names
        self.starts: tuple[str, ...] = (form.open, *form.others)
        self.close = form.close

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        site.tape.keep(start)
        yield from site.tape.spaces()
        yield from site.tape.take("[")
        return (yield from self.objects(site))

    def objects(self, site: CallSite) -> Reading[bool]:
        """Reads the calls after a bracket that may begin a list, or after the tag; what was read is
        kept."""
        tape = site.tape
        yield from tape.spaces()
        while (yield from tape.take("{")):
            if not (yield from _JsonCall(self._form, site).read()):
                return site.end()
            site.count()
            tape.keep()
            yield from tape.run(_REST)
        if site.num_calls:
            tape.kept()
        return site.end()


class _JsonCall:
    """Reads one object after its opening brace."""

    def __init__(self, form: JsonCalls, site: CallSite) -> None:
        self._site, self._tape, self._found = site, site.tape, site.found
        self._ends = tuple(filter(None, (form.close, form.open, *form.others)))
        self._arguments: str | None = None
        self._name: str | None = None
        self._has_begun = False

    def read(self) -> Reading[bool]:
        """Returns whether the object is a call."""
        is_whole = yield from self._members()
        if self._has_begun:
            return True
        is_cut = self._tape.is_cut and self._tape.is_empty
        if self._name is None or not (is_whole or self._arguments) or is_cut:
            return False
        arguments = object_of(self._arguments or "")
        if arguments is None:
            return False
        self._found.start(self._name)
        self._found.arguments(arguments)
        return True

    def _members(self) -> Reading[bool]:
        """Returns whether the object ended by itself; stops early if it cannot be a call."""
        tape = self._tape
        while True:
            yield from tape.run(_BETWEEN)
            if (yield from tape.take("}")):
                return True
            key = yield from self._key()
            if key is None:
                return False
            if key == "name" and self._name is None:
                self._name = name = loaded((yield from self._text()))
                if not isinstance(name, str) or not name or not self._site.is_known(name):
                    return False
            elif key in ("arguments", "parameters") and self._arguments is None:
                yield from self._read_arguments()
            else:
                yield from self._text()

    def _key(self) -> Reading[str | None]:
        """Reads a key and its colon. Returns None if there is none."""
        tape = self._tape
        quote = yield from tape.take(*QUOTES)
        if not quote:
            return None
        tape.unread(quote)
        key = loaded((yield from self._text()))
        yield from tape.spaces()
        if not (yield from tape.take(":")):
            return None
        yield from tape.spaces()
        return key if isinstance(key, str) else None

    def _text(self) -> Reading[str]:
        """Reads a value and returns its JSON."""
        pieces: list[str] = []
        yield from value(self._tape, pieces.append, self._ends)
        return "".join(pieces)

    def _read_arguments(self) -> Reading[None]:
        tape = self._tape
        if not (yield from tape.take("{")):
            self._arguments = yield from self._text()
            return
        tape.unread("{")
        give = None
        if self._name is not None:
            self._has_begun = True
            self._site.start(self._name)
            give = self._found.arguments
        pieces: list[str] = []
        yield from value(tape, give or pieces.append, self._ends, is_object=True)
        self._arguments = "".join(pieces)
