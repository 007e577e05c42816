"""Calls written with a name, then keys and values in tags of their own.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

A value is a text, read by its schema (`Value`); a string is taken as it stands, line breaks at its
ends too. Strings stream as they come. A string may contain the format's own tags: it ends at a
closing tag that is followed by a tag that may come next. Models also forget closing tags, so a
value ends too at the end of the call if another call or the end of the answer follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidRequestError
from milepost.server.parsing import lark
from milepost.server.parsing.events import CallSite, FoundEvents
from milepost.server.parsing.literals import value
from milepost.server.parsing.scanning import bracketed
from milepost.server.parsing.strings import Give, inside, quoted
from milepost.server.parsing.tape import Reading, Tape
from milepost.server.parsing.values import Functions, Parameters, Value

MAX_NAME_LEN = 1024
_NAME = re.compile(r"[^<\n{]*")
_KEY = re.compile(r"[^<]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedCalls:
    """Tags of a family."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    signs: tuple[str, ...] = ("<tool_call>", "<arg_key>", "<arg_value>")

    def reader(self, tools: lark.Tools) -> _KeyedReader:
        return _KeyedReader(self, tools)

    def following(self, end: str) -> tuple[str, ...]:
        """Returns the tags that can follow a closing tag."""
        return (self.key[0], self.close, self.open) if end == self.value[1] else (self.open,)

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        more = "" if is_single else '("\\n" call)*'
        call = f"{tag(self.open)} ({' | '.join(named)}) {tag(self.close)}"
        rules = [f"calls: call {more}", f"call: {call}"]
        for rule, tool in named.items():
            rules += self._function(rule, tool)
        return rules

    def _function(self, rule: str, tool: Mapping[str, Any]) -> list[str]:
        """Returns the rules of one function. Arguments come in the order of the schema; those that
        are not required may be left out."""
        parameters = Parameters(lark.parameters(tool))
        end, barred = f"{self.value[1]}\n", self._barred
        strictly = {"is_strict": lark.is_strict(tool)}
        parts, rules = [], []
        for number, (key, its) in enumerate(parameters.named.items()):
            own = f"{rule}_p{number}"
            parts.append(own if key in parameters.required else f"{own}?")
            rules.append(f"{own}: {lark.text(self._head(_checked(key, _KEY)))} {own}_v")
            rules += its.rules(f"{own}_v", end, barred, **strictly)
        if parameters.others is not None:
            parts.append(f"{rule}_o*")
            name, (before, after) = f"{rule}_k".upper(), self._head("\n").split("\n", 1)
            rules.append(f"{rule}_o: {lark.text(before)} {name} {lark.text(after)} {rule}_v")
            rules.append(f"{name}: {_other_keys(parameters.named)}")
            rules += parameters.others.rules(f"{rule}_v", end, barred, **strictly)
        head = lark.text(_checked(tool["function"]["name"], _NAME) + "\n")
        return [f"{rule}: {head} {' '.join(parts)}", *rules]

    def _head(self, key: str) -> str:
        return f"{self.key[0]}{key}{self.key[1]}\n{self.value[0]}"

    @property
    def _barred(self) -> str:
        """A pattern of everything that would end a string."""
        ends = [
            rf"{re.escape(end)}\s*(?:{'|'.join(map(re.escape, self.following(end)))})"
            for end in (self.value[1], self.close)
        ]
        return "|".join(ends)


def _checked(name: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name) or name != name.strip():
        raise InvalidRequestError(f"tools: this model cannot write the name {name!r}")
    return name


def _other_keys(names: Mapping[str, Any]) -> str:
    """Returns a rule for keys that are not among these."""
    free = lark.regex(r"[^<\s]([^<\n]*[^<\s])?")
    return f"{free} & ~{lark.regex('|'.join(map(re.escape, names)))}" if names else free


class _KeyedReader:
    """Reads the calls of one answer."""

    def __init__(self, form: KeyedCalls, tools: lark.Tools) -> None:
        self._form = form
        self._functions = Functions(tools)
        self.names = self._functions.names
        self.starts: tuple[str, ...] = (form.open,)
        self.close = form.close

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        """Returns whether it was a call: its first key or its end tells."""
        form, tape = self._form, site.tape
        tape.keep(start)
        yield from tape.spaces()
        name = (yield from tape.run(_NAME, MAX_NAME_LEN)).strip()
        is_named = 0 < len(name) <= MAX_NAME_LEN and site.is_known(name)
        yield from tape.spaces()
        if not is_named or not (yield from tape.peek(form.key[0], form.close, "{")):
            return site.end()
        site.start(name)
        call = _KeyedCall(form, tape, site.found, self._functions.parameters(name))
        yield from call.read()
        return True


class _KeyedCall:
    """Reads one call after its function's name."""

    def __init__(
        self, form: KeyedCalls, tape: Tape, found: FoundEvents, schema: Parameters
    ) -> None:
        self._form = form
        self._tape = tape
        self._found = found
        self._schema = schema
        self._has_any = False

    def read(self) -> Reading[None]:
        """Reads the arguments. Text between them becomes content."""
        form, tape, found = self._form, self._tape, self._found
        if (yield from tape.peek("{")):  # all arguments as one object, as models also write them
            ends = (form.close, form.open)
            yield from value(tape, found.arguments, ends, is_object=True)
            self._end((yield from tape.until(found.content, *ends)))
            return
        mark = form.value[1]
        while mark == form.value[1]:
            mark = yield from tape.until(found.content, form.key[0], form.close, form.open)
            if mark == form.key[0]:
                mark = yield from self._argument()
        if mark or not tape.is_cut:
            found.arguments("}" if self._has_any else "{}")
        self._end(mark)

    def _end(self, mark: str) -> None:
        if mark == self._form.close:
            self._found.end_call()
        else:
            self._tape.unread(mark)

    def _argument(self) -> Reading[str]:
        """Reads an argument after the tag of its key. Returns the tag that ended it."""
        tape, form, found = self._tape, self._form, self._found
        key = yield from tape.run(_KEY, MAX_NAME_LEN)
        if len(key) > MAX_NAME_LEN or not (yield from tape.take(form.key[1])):
            found.content(form.key[0] + key)
            return form.value[1]
        yield from tape.spaces()
        if not (yield from tape.take(form.value[0])):
            found.content(f"{form.key[0]}{key}{form.key[1]}")
            return form.value[1]
        key = key if key in self._schema.named else key.strip()
        found.arguments(f"{', ' if self._has_any else '{'}{quoted(key)}: ")
        self._has_any = True
        its = self._schema.value(key)
        return (yield from (self._string() if its.is_text else self._other(its)))

    def _string(self) -> Reading[str]:
        """Passes on a string as it comes. Returns the tag that ended it."""
        give = self._found.arguments
        give('"')
        end = yield from self._rest(lambda piece: give(inside(piece)), has_tags=True)
        if end or not self._tape.is_cut:
            give('"')
        return end

    def _other(self, its: Value) -> Reading[str]:
        """Passes on a value once its text is complete. Returns the tag that ended it."""
        tape = self._tape
        pieces = [(yield from tape.spaces())]
        if its.brackets and (yield from tape.peek(*its.brackets)):
            yield from bracketed(tape, pieces.append, (self._form.value[1],))
        end = yield from self._rest(pieces.append, has_tags=its.has_strings)
        whole = "".join(pieces)
        is_over = end or not tape.is_cut
        self._found.arguments(its.of_text(whole) if is_over else whole.strip())
        return end

    def _rest(self, give: Give, *, has_tags: bool) -> Reading[str]:
        """Passes on the rest of a value. Returns the tag that ended it, or "". With `has_tags` a
        tag may be part of the value; the text around it decides."""
        tape, form = self._tape, self._form
        while mark := (yield from tape.until(give, form.value[1], form.close)):
            if not has_tags:
                return mark
            after = yield from tape.spaces()
            options = form.following(mark)
            if (yield from tape.peek(*options)) or tape.may_start(*options):
                return mark
            give(mark + after)
        return ""
