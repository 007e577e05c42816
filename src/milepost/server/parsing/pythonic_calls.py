"""Calls written as in Python.

    <|tool_call_start|>[f(a=1, s='x'), g()]<|tool_call_end|>

Values are literals of Python or JSON, each passed on when it is complete. In a required call they
are JSON, which every reader understands. A value without a keyword belongs to the next parameter in
the order of the schema. If it is told to, LFM2 writes the objects of `JsonCalls` between its tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import CallSite
from milepost.server.parsing.json_calls import JsonCalls, JsonReader
from milepost.server.parsing.scanning import argument, literal, loaded
from milepost.server.parsing.strings import quoted
from milepost.server.parsing.tape import Reading
from milepost.server.parsing.values import Functions, Parameters

_BETWEEN = re.compile(r"[\s,]*")
_LETTER = r"[^\s=(),'\"\[\]{}<>]"
_NAME = re.compile(f"{_LETTER}*")
_WRITABLE = f"{_LETTER}+"
_REST = re.compile(r"[\s\]})]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls:
    """Tags of a family."""

    open: str
    close: str
    layout: tuple[str, str, str]
    """Text before the first call, between two calls, and after the last one."""
    signs: tuple[str, ...]

    def reader(self, tools: lark.Tools) -> _PythonicReader:
        return _PythonicReader(self, tools)

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        before, between, after = (lark.text(part) for part in self.layout)
        more = "" if is_single else f"({between} call)*"
        rules = [
            f"calls: {tag(self.open)} {before} call {more} {after} {tag(self.close)}",
            f"call: {' | '.join(named)}",
        ]
        for rule, tool in named.items():
            rules += _function(rule, tool)
        return rules


def _function(rule: str, tool: Mapping[str, Any]) -> list[str]:
    """Returns the rules of one function. Parameters come in the order of the schema; those that are
    not required may be left out."""
    parameters, strictly = Parameters(lark.parameters(tool)), {"is_strict": lark.is_strict(tool)}
    head = lark.text(lark.writable(tool["function"]["name"], _WRITABLE) + "(")
    if not parameters.named and parameters.others is not None:
        value = parameters.others.json_rule(**strictly)
        return [
            f'{rule}: {head} ({rule}_p (", " {rule}_p)*)? ")"',
            f'{rule}_p: /[A-Za-z_][A-Za-z0-9_]*/ "=" {value}',
        ]
    rules = [f'{rule}: {head} {rule}_f0 ")"']
    for i, (name, its) in enumerate(parameters.named.items()):
        pair, first, more = f"{rule}_p{i}", f"{rule}_f{i + 1}", f"{rule}_m{i + 1}"
        key = lark.text(f"{lark.writable(name, _WRITABLE)}=")
        rules.append(f"{pair}: {key} {its.json_rule(**strictly)}")
        skip, mark = ("", "") if name in parameters.required else (f" | {first}", "?")
        rules.append(f"{rule}_f{i}: {pair} {more}{skip}")
        rules.append(f'{rule}_m{i}: (", " {pair}){mark} {more}')
    num = len(parameters.named)
    return [*rules, f'{rule}_f{num}: ""', f'{rule}_m{num}: ""']


class _PythonicReader:
    def __init__(self, form: PythonicCalls, tools: lark.Tools) -> None:
        self._functions = Functions(tools)
        self.names = self._functions.names
        self.starts: tuple[str, ...] = (form.open,)
        self.close = form.close
        self._ends = (form.close, form.open)
        self._json = JsonReader(JsonCalls(open=form.open, close=form.close), self.names)

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        tape = site.tape
        tape.keep(start)
        yield from tape.spaces()
        yield from tape.take("[")
        yield from tape.spaces()
        if (yield from tape.peek("{")):
            return (yield from self._json.objects(site))
        while True:
            yield from tape.run(_BETWEEN)
            name = yield from tape.run(_NAME, lark.MAX_NAME_LEN)
            is_named = name and len(name) <= lark.MAX_NAME_LEN and site.is_known(name)
            if not is_named or not (yield from tape.take("(")):
                break
            call = _PythonicCall(name, site, self._functions.parameters(name), self._ends)
            if not (yield from call.read()):
                break
            site.count()
            tape.keep()
        is_call = site.end()
        if is_call:
            yield from tape.run(_REST)
        return is_call


class _PythonicCall:
    """Reads one call after its parenthesis."""

    def __init__(
        self, name: str, site: CallSite, parameters: Parameters, ends: tuple[str, ...]
    ) -> None:
        self._name, self._site = name, site
        self._tape, self._found = site.tape, site.found
        self._parameters = parameters
        self._ends = ends
        self._given: set[str] = set()
        self._num_unnamed = 0
        self._has_begun = False

    def read(self) -> Reading[bool]:
        """Returns whether it is a call: the first value or the end tells."""
        tape = self._tape
        while True:
            yield from tape.run(_BETWEEN)
            if (yield from tape.take(")")):
                return self._end()
            if (yield from tape.take("]", "}")) or (yield from tape.peek(*self._ends)):
                return self._end()
            if tape.is_empty and tape.is_over:
                return self._has_begun and (tape.is_cut or self._end())
            yield from self._argument()

    def _end(self) -> bool:
        self._add("" if self._given else "{")
        self._found.arguments("}")
        return True

    def _argument(self) -> Reading[None]:
        """Reads a value, with its keyword if it has one."""
        tape, pieces = self._tape, []
        word = yield from tape.run(_NAME, lark.MAX_NAME_LEN)
        gap = yield from tape.spaces()
        is_keyword = word and (yield from tape.take("="))
        if not is_keyword:
            pieces.append(word + gap)
        is_whole = yield from argument(tape, pieces.append, self._ends)
        text, is_cut = "".join(pieces).strip(), tape.is_cut and not is_whole
        if is_cut and not is_keyword:
            return
        if is_keyword:
            self._keyword(word, text, is_cut=is_cut)
        elif text.startswith("**"):
            self._members(text[2:])
        else:
            self._unnamed(text)

    def _keyword(self, name: str, text: str, *, is_cut: bool = False) -> None:
        given = self._parameters.value(name).of_literal(text, is_cut=is_cut)
        self._member(name, given)

    def _member(self, name: str, json: str) -> None:
        before = ", " if self._given else "{"
        self._given.add(name)
        self._add(f"{before}{quoted(name)}: {json}")

    def _members(self, text: str) -> None:
        """Adds the members of an object as keywords."""
        found = literal(text, is_python=True)
        inner = "" if found is None else found.json.strip()
        if not inner.startswith("{"):
            self._unnamed(text)
        elif inner := inner[1:-1].strip():
            before = ", " if self._given else "{"
            self._given.update(loaded(f"{{{inner}}}") or ("",))
            self._add(before + inner)

    def _unnamed(self, text: str) -> None:
        """Adds a value to the next parameter, or an object's members to the parameters they
        name."""
        found = literal(text, is_python=True)
        inner = None if found is None else loaded(found.json)
        if isinstance(inner, dict) and inner and self._parameters.named.keys() >= inner.keys():
            self._members(text)
            return
        self._num_unnamed += 1
        free = (name for name in self._parameters.named if name not in self._given)
        self._keyword(next(free, f"arg{self._num_unnamed}"), text)

    def _add(self, text: str) -> None:
        """Announces the call if it is new, and adds to its arguments."""
        if not self._has_begun:
            self._has_begun = True
            self._site.start(self._name)
        self._found.arguments(text)
