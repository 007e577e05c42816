"""Calls written with a tag for the function and one for each parameter.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A parameter's value is a text, read by its schema (`Value`); one line break beside each tag is not
part of it. Strings stream as they come. A string may hold the format's own tags: it ends where a
closing tag is followed by what can come then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidRequestError
from milepost.server.parsing import lark
from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.json_text import value
from milepost.server.parsing.schemas import Schema, required_of, resolved
from milepost.server.parsing.tape import Reading, Tape, peek, run, spaces, tags, take, until
from milepost.server.parsing.values import Value

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
        """A pattern of what would end a string."""
        following = "|".join(map(re.escape, (self.parameter[0], self.function[1], self.close)))
        ends = rf"{re.escape(self.parameter[1])}\s*(?:{following})"
        return rf"{ends}|{re.escape(self.function[1])}\s*{re.escape(self.close)}"

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        """Rules of which `calls` is the whole."""
        names = [f"tool{i}" for i in range(len(tools))]
        more = "" if is_single else '("\\n" call)*'
        call = f'{tag(self.open)} "\\n" ({" | ".join(names)}) "\\n" {tag(self.close)}'
        rules = [f"calls: call {more}", f"call: {call}"]
        for rule, tool in zip(names, tools, strict=True):
            rules += self._function(rule, tool)
        return rules

    def _function(self, rule: str, tool: Mapping[str, Any]) -> list[str]:
        """Parameters in the order of the schema; those that are not required may be left out."""
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
    """A name that is none of these."""
    free = lark.regex(r"[^>\s]([^>\n]*[^>\s])?")
    return f"{free} & ~{lark.regex('|'.join(map(re.escape, names)))}" if names else free


class Parameters:
    """The schema of a function's arguments, by parameter."""

    def __init__(self, schema: Schema) -> None:
        whole = resolved(schema, schema)
        given = whole.get("properties")
        given = given if isinstance(given, Mapping) else {}
        self.required = required_of(whole)
        self.named = {name: Value(its, schema) for name, its in given.items()}
        more = whole.get("additionalProperties", not given)
        self.others = None if more is False else Value(more, schema)

    def value(self, name: str) -> Value:
        return self.named.get(name) or self.others or Value({}, {})


class _TaggedReader:
    """Reads the calls of one answer. Models forget the first tag: a function's own will do."""

    def __init__(self, form: TaggedCalls, tools: lark.Tools) -> None:
        self._form = form
        self._schemas = {t["function"]["name"]: lark.parameters(t) for t in tools}
        self._known: dict[str, Parameters] = {}
        self.starts = (form.open, form.function[0])
        self.close = form.close

    def read(self, tape: Tape, found: FoundEvents, start: str) -> Reading[bool]:
        form = self._form
        seen = start
        if start == form.open:
            seen += yield from spaces(tape)
            seen += yield from take(tape, tags(form.function[0]))
        name = end = ""
        if seen.endswith(form.function[0]):
            name = yield from run(tape, _NAME, MAX_NAME_LEN)
            end = "" if len(name) > MAX_NAME_LEN else (yield from take(tape, tags(">")))
        known = name if name in self._schemas else name.strip()
        if not known or not end or (start != form.open and known not in self._schemas):
            found.content(seen + name + end)
            return False
        found.start(known)
        yield from _TaggedCall(form, tape, found, self._parameters(known)).read()
        return True

    def _parameters(self, name: str) -> Parameters:
        if name not in self._known:
            self._known[name] = Parameters(self._schemas.get(name, {}))
        return self._known[name]


class _TaggedCall:
    """Reads one call behind its function's opening tag."""

    def __init__(
        self, form: TaggedCalls, tape: Tape, found: FoundEvents, schema: Parameters
    ) -> None:
        self._form = form
        self._tape = tape
        self._found = found
        self._schema = schema
        self._before = "{"

    def read(self) -> Reading[None]:
        """What is no parameter becomes content. A call that is cut off stays unfinished."""
        form = self._form
        marks = tags(form.parameter[0], form.function[1], form.close)
        mark = form.parameter[0]
        while mark == form.parameter[0]:
            mark = yield from until(self._tape, marks, self._found.content)
            if mark == form.parameter[0]:
                mark = yield from self._parameter()
        if mark:
            self._found.arguments("{}" if self._before == "{" else "}")
        if mark == form.close:
            self._tape.unread(mark)

    def _parameter(self) -> Reading[str]:
        """The opening tag of what may come next, or the closing one that ended the call."""
        tape, form, found = self._tape, self._form, self._found
        name = yield from run(tape, _NAME, MAX_NAME_LEN)
        if len(name) > MAX_NAME_LEN or not (yield from take(tape, tags(">"))):
            found.content(form.parameter[0] + name)
            return form.parameter[0]
        name = name if name in self._schema.named else name.strip()
        found.arguments(f"{self._before}{json.dumps(name, ensure_ascii=False)}: ")
        self._before = ", "
        yield from take(tape, tags("\n"))
        its = self._schema.value(name)
        end = yield from (self._string() if its.is_text else self._other(its))
        return form.parameter[0] if end == form.parameter[1] else end

    def _string(self) -> Reading[str]:
        """A string, as it comes; returns the tag that ended it."""
        give = self._found.arguments
        give('"')
        end = yield from self._rest(_Text(lambda piece: give(_inside(piece))))
        give('"' if end else "")
        return end

    def _other(self, its: Value) -> Reading[str]:
        """What its text means, once that is known; returns the tag that ended it."""
        tape, form = self._tape, self._form
        pieces: list[str] = []
        text = _Text(pieces.append)
        text.give((yield from spaces(tape)))
        if its.brackets and (yield from peek(tape, tags(*its.brackets))):
            yield from value(tape, text.give, (form.parameter[1], form.function[1]))
        end = yield from self._rest(text, has_tags=its.has_strings)
        whole = "".join(pieces)
        self._found.arguments(its.as_json(whole) if end else whole.strip())
        return end

    def _rest(self, text: _Text, *, has_tags: bool = True) -> Reading[str]:
        """Pass on what is left of a value; returns the tag that ended it, "" if none did.

        With `has_tags` a tag may be part of the value: what follows it tells.
        """
        tape, (_, closed), form = self._tape, self._form.function, self._form
        following = {
            form.parameter[1]: tags(form.parameter[0], closed, form.close),
            closed: tags(form.close),
        }
        ends = tags(*following)
        while mark := (yield from until(tape, ends, text.give)):
            if not has_tags:
                return mark
            behind = yield from spaces(tape)
            if (yield from peek(tape, following[mark])) or tape.may_start(following[mark]):
                return mark
            text.give(mark + behind)
        return ""


class _Text:
    """Passes on a value, but a line break at its end, which is not part of it."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._held = ""

    def give(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        text = text[: len(text) - len(self._held)]
        if text:
            self._give(text)


def _inside(text: str) -> str:
    """A text as it stands inside JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
