"""Calls written with a tag for the function and one for each parameter.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A parameter's value is a text, read by its schema (`Value`), without one line break next to each
tag. Strings stream as they come. A string may contain the format's own tags: it ends at a closing
tag that is followed by a tag that may come next. Models also forget closing tags. So a value ends
too at the opening tag of a parameter that is not given yet, at the beginning of a line, and at the
end of the call if another call or the end of the answer follows.
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
from milepost.server.parsing.strings import TextLine, inside, quoted
from milepost.server.parsing.tape import Reading, Tape
from milepost.server.parsing.values import Functions, Parameters, Value

MAX_NAME_LEN = 1024
_NAME = re.compile(r"[^>\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Tags of a family."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    function: tuple[str, str] = ("<function=", "</function>")
    parameter: tuple[str, str] = ("<parameter=", "</parameter>")
    signs: tuple[str, ...] = ("<tool_call>", "<function=")

    def reader(self, tools: lark.Tools) -> _TaggedReader:
        return _TaggedReader(self, tools)

    @property
    def barred(self) -> str:
        """A pattern of everything that would end a string."""
        ends = [
            rf"{re.escape(end)}\s*(?:{'|'.join(map(re.escape, self.following(end)))})"
            for end in (self.parameter[1], self.function[1])
        ]
        more = "|".join(map(re.escape, self.following(self.close)))
        ends.append(rf"\n\s*{re.escape(self.close)}\s*(?:{more})")
        return "|".join([*ends, rf"\n\s*{re.escape(self.parameter[0])}"])

    def following(self, end: str) -> tuple[str, ...]:
        """Returns the tags that can follow a closing tag."""
        new = (self.open, self.function[0])
        if end == self.parameter[1]:
            return (self.parameter[0], self.function[1], self.close, *new)
        return (self.close, *new) if end == self.function[1] else new

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        more = "" if is_single else '("\\n" call)*'
        call = f'{tag(self.open)} "\\n" ({" | ".join(named)}) "\\n" {tag(self.close)}'
        rules = [f"calls: call {more}", f"call: {call}"]
        for rule, tool in named.items():
            rules += self._function(rule, tool)
        return rules

    def _function(self, rule: str, tool: Mapping[str, Any]) -> list[str]:
        """Returns the rules of one function. Parameters come in the order of the schema; those that
        are not required may be left out."""
        parameters = Parameters(lark.parameters(tool))
        end = f"\n{self.parameter[1]}\n"
        strictly = {"is_strict": lark.is_strict(tool)}
        parts, rules = [], []
        for number, (key, its) in enumerate(parameters.named.items()):
            own = f"{rule}_p{number}"
            parts.append(own if key in parameters.required else f"{own}?")
            rules.append(f"{own}: {lark.text(self._head(self.parameter[0], key))} {own}_v")
            rules += its.rules(f"{own}_v", end, self.barred, **strictly)
        if parameters.others is not None:
            parts.append(f"{rule}_o*")
            key = f"{rule}_k".upper()
            rules.append(f'{rule}_o: "{self.parameter[0]}" {key} ">\\n" {rule}_v')
            rules.append(f"{key}: {_other_names(parameters.named)}")
            rules += parameters.others.rules(f"{rule}_v", end, self.barred, **strictly)
        head = lark.text(self._head(self.function[0], tool["function"]["name"]))
        return [f'{rule}: {head} {" ".join(parts)} "{self.function[1]}"', *rules]

    def _head(self, tag: str, name: str) -> str:
        if not _NAME.fullmatch(name) or name != name.strip():
            raise InvalidRequestError(f"tools: this model cannot write the name {name!r}")
        return f"{tag}{name}>\n"


def _other_names(names: Mapping[str, Any]) -> str:
    """Returns a rule for names that are not among these."""
    free = lark.regex(r"[^>\s]([^>\n]*[^>\s])?")
    return f"{free} & ~{lark.regex('|'.join(map(re.escape, names)))}" if names else free


class _TaggedReader:
    """Reads the calls of one answer. Models forget the first tag, so a function's own tag is
    enough."""

    def __init__(self, form: TaggedCalls, tools: lark.Tools) -> None:
        self._form = form
        self._functions = Functions(tools)
        self.names = self._functions.names
        self.starts: tuple[str, ...] = (form.open, form.function[0])
        self.close = form.close

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        """Returns whether it was a call: its first parameter or its end tells."""
        form, tape = self._form, site.tape
        tape.keep(start)
        begun = start == form.function[0]
        if not begun:
            yield from tape.spaces()
            begun = bool((yield from tape.take(form.function[0])))
        name = (yield from self._name(tape)) if begun else ""
        is_named = name and site.is_known(name) and (start == form.open or name in self.names)
        if not is_named or not (yield from self._goes_on(tape)):
            return site.end()
        site.start(name)
        call = _TaggedCall(form, tape, site.found, self._functions.parameters(name))
        yield from call.read()
        return True

    def _name(self, tape: Tape) -> Reading[str]:
        """Reads a function's name and the end of its tag. Returns "" if there is none."""
        name = yield from tape.run(_NAME, MAX_NAME_LEN)
        if len(name) > MAX_NAME_LEN or not (yield from tape.take(">")):
            return ""
        return name if name in self.names else name.strip()

    def _goes_on(self, tape: Tape) -> Reading[bool]:
        """Returns whether a part of a call follows."""
        yield from tape.spaces()
        form = self._form
        options = (form.parameter[0], form.function[1], form.close, "{")
        return bool((yield from tape.peek(*options)))


class _TaggedCall:
    """Reads one call after its function's opening tag."""

    def __init__(
        self, form: TaggedCalls, tape: Tape, found: FoundEvents, schema: Parameters
    ) -> None:
        self._form = form
        self._tape = tape
        self._found = found
        self._schema = schema
        self._given: set[str] = set()
        head = form.parameter[0]
        names = [name for name in schema.named if _NAME.fullmatch(name)]
        self._heads = {f"{head}{name}>": name for name in names} or {head: ""}
        """Tags of parameters, which end a value that is not closed."""

    def read(self) -> Reading[None]:
        """Reads the parameters. Text between them becomes content."""
        form, tape, found = self._form, self._tape, self._found
        if (yield from tape.peek("{")):
            yield from self._whole()
            return
        marks = (form.parameter[0], form.function[1], form.close, form.open, form.function[0])
        mark = form.parameter[0]
        while mark == form.parameter[0]:
            mark = yield from tape.until(found.content, *marks)
            if mark == form.parameter[0]:
                mark = yield from self._parameter()
        if mark or not tape.is_cut:
            found.arguments("}" if self._given else "{}")
        self._end(mark)

    def _whole(self) -> Reading[None]:
        """Reads all arguments as one object, as models also write them."""
        form, tape, found = self._form, self._tape, self._found
        ends = (form.function[1], form.close, form.open, form.function[0])
        yield from value(tape, found.arguments, ends, is_object=True)
        self._end((yield from tape.until(found.content, *ends)))

    def _end(self, mark: str) -> None:
        if mark == self._form.close:
            self._found.end_call()
        elif mark != self._form.function[1]:
            self._tape.unread(mark)

    def _parameter(self) -> Reading[str]:
        """Reads a parameter. Returns the opening tag of the next one, or the tag that ended the
        call."""
        tape, form, found = self._tape, self._form, self._found
        name = yield from tape.run(_NAME, MAX_NAME_LEN)
        if len(name) > MAX_NAME_LEN or not (yield from tape.take(">")):
            found.content(form.parameter[0] + name)
            return form.parameter[0]
        name = name if name in self._schema.named else name.strip()
        found.arguments(f"{', ' if self._given else '{'}{quoted(name)}: ")
        self._given.add(name)
        yield from tape.take("\n")
        its = self._schema.value(name)
        end = yield from (self._string() if its.is_text else self._other(its))
        return form.parameter[0] if end == form.parameter[1] else end

    def _string(self) -> Reading[str]:
        """Passes on a string as it comes. Returns the tag that ended it."""
        give = self._found.arguments
        give('"')
        end = yield from self._rest(TextLine(lambda piece: give(inside(piece))))
        if end or not self._tape.is_cut:
            give('"')
        return end

    def _other(self, its: Value) -> Reading[str]:
        """Passes on a value once its text is complete. Returns the tag that ended it."""
        tape, form = self._tape, self._form
        pieces: list[str] = []
        text = TextLine(pieces.append)
        text.give((yield from tape.spaces()))
        if its.brackets and (yield from tape.peek(*its.brackets)):
            yield from bracketed(tape, text.give, (form.parameter[1], form.function[1]))
        end = yield from self._rest(text, has_tags=its.has_strings)
        whole = "".join(pieces)
        is_over = end or not tape.is_cut
        self._found.arguments(its.of_text(whole) if is_over else whole.strip())
        return end

    def _rest(self, text: TextLine, *, has_tags: bool = True) -> Reading[str]:
        """Passes on the rest of a value without the line break at its end. Returns the tag that
        ended it, or "". With `has_tags` a tag may be part of the value; the text around it decides.
        """
        end = yield from self._end_of_value(text, has_tags=has_tags)
        text.release(without="\n")
        return end

    def _end_of_value(self, text: TextLine, *, has_tags: bool) -> Reading[str]:
        tape, form = self._tape, self._form
        closes = (form.parameter[1], form.function[1], form.close)
        while mark := (yield from tape.until(text.give, *closes, *self._heads)):
            is_new = bool(text.last) and text.is_new
            if mark in self._heads:
                if not has_tags or (is_new and self._heads[mark] not in self._given):
                    tape.unread(mark)
                    return form.parameter[1]
                text.give(mark)
                continue
            if not has_tags:
                return mark
            after = yield from tape.spaces()
            options = form.following(mark)
            if (mark != form.close or is_new) and (
                (yield from tape.peek(*options)) or tape.may_start(*options)
            ):
                return mark
            text.give(mark + after)
        return ""
