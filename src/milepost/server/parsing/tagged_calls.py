"""Calls written with a name and a tag for each argument.

    <tool_call>                          <tool_call>f
    <function=f>                         <arg_key>a</arg_key>
    <parameter=a>                        <arg_value>1</arg_value>
    1                                    </tool_call>
    </parameter>
    </function>
    </tool_call>

A value is a text, read by its schema (`Value`). Strings stream as they come. A string may contain
the format's own tags: it ends at a closing tag that is followed by a tag that may come next. Models
also forget closing tags, so a value ends too at the end of the call if another call or the end of
the answer follows. Where a value stands on lines of its own (`line`, to the left), the line breaks
next to its tags are not part of it, and the tag of an argument that is not given yet ends it at the
beginning of a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.events import CallSite, FoundEvents
from milepost.server.parsing.literals import value
from milepost.server.parsing.scanning import bracketed
from milepost.server.parsing.strings import TextLine, inside, quoted
from milepost.server.parsing.tape import ManyTexts, Reading, Tape
from milepost.server.parsing.values import Functions, Parameters, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Tags of a family. An empty text is no tag."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    function: tuple[str, str, str] = ("<function=", ">", "</function>")
    """Text before a function's name, after it, and after the arguments."""
    key: tuple[str, str] = ("<parameter=", ">")
    """Text before and after an argument's name."""
    value: tuple[str, str] = ("", "</parameter>")
    """Text before and after a value."""
    names: tuple[str, str] = (r"[^>\n]*", r"[^>\n]*")
    """Patterns of the names of functions and of arguments."""
    line: str = "\n"
    """Text between two tags of a call, and between a tag and its value."""
    signs: tuple[str, ...] = ("<tool_call>", "<function=")

    def reader(self, tools: lark.Tools) -> _TaggedReader:
        return _TaggedReader(self, tools)

    @property
    def starts(self) -> tuple[str, ...]:
        """Tags that begin a call. Models forget the first, so a function's own is enough."""
        return _tags(self.open, self.function[0])

    @property
    def closes(self) -> tuple[str, ...]:
        """Tags that may end a value."""
        return _tags(self.value[1], self.function[2], self.close)

    def following(self, end: str = "") -> tuple[str, ...]:
        """Returns the tags that can follow a closing tag, by default a value's."""
        tags = (self.key[0], *_tags(self.function[2]), self.close)
        return (*tags[tags.index(end) + 1 if end in tags else 0 :], *self.starts)

    def _barred(self) -> str:
        """Returns a pattern of everything that would end a string."""
        line = r"\n\s*" if self.line else ""
        ends = [line + re.escape(self.key[0])] if line else []
        for end in self.closes:
            before = line if end == self.close else ""
            ends.append(rf"{before}{re.escape(end)}\s*(?:{_any(self.following(end))})")
        return "|".join(ends)

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        named = lark.numbered(tools)
        more = "" if is_single else '("\\n" call)*'
        before, after = lark.text(self.line), lark.text(self.function[2] + self.line)
        call = f"{tag(self.open)} {before} ({' | '.join(named)}) {after} {tag(self.close)}"
        rules = [f"calls: call {more}", f"call: {call}"]
        for rule, tool in named.items():
            rules += self._function(rule, tool)
        return rules

    def _function(self, rule: str, tool: Mapping[str, Any]) -> list[str]:
        """Returns the rules of one function. Arguments come in the order of the schema; those that
        are not required may be left out."""
        parameters = Parameters(lark.parameters(tool))
        strictly = {"is_strict": lark.is_strict(tool)}
        end, barred = f"{self.line}{self.value[1]}\n", self._barred()
        before, after = self.key[0], f"{self.key[1]}\n{self.value[0]}"
        parts, rules = [], []
        for number, (key, its) in enumerate(parameters.named.items()):
            part = f"{rule}_p{number}"
            parts.append(part if key in parameters.required else f"{part}?")
            head = before + lark.writable(key, self.names[1]) + after
            rules.append(f"{part}: {lark.text(head)} {part}_v")
            rules += its.rules(f"{part}_v", end, barred, **strictly)
        if parameters.others is not None:
            parts.append(f"{rule}_o*")
            name = f"{rule}_k".upper()
            rules.append(f"{rule}_o: {lark.text(before)} {name} {lark.text(after)} {rule}_v")
            rules.append(f"{name}: {self._other_keys(parameters.named)}")
            rules += parameters.others.rules(f"{rule}_v", end, barred, **strictly)
        name = lark.writable(tool["function"]["name"], self.names[0])
        head = lark.text(f"{self.function[0]}{name}{self.function[1]}\n")
        return [f"{rule}: {head} {' '.join(parts)}", *rules]

    def _other_keys(self, names: Mapping[str, Any]) -> str:
        """Returns a rule for keys that are not among these."""
        mark = self.key[1][0]
        free = lark.regex(rf"[^{mark}\s]([^{mark}\n]*[^{mark}\s])?")
        return f"{free} & ~{lark.regex(_any(names))}" if names else free


def _tags(*texts: str) -> tuple[str, ...]:
    return tuple(filter(None, texts))


def _any(texts: Collection[str]) -> str:
    return "|".join(map(re.escape, texts))


class _TaggedReader:
    """Reads the calls of answers to one request."""

    def __init__(self, form: TaggedCalls, tools: lark.Tools) -> None:
        self._form = form
        self._functions = Functions(tools)
        self._pattern = re.compile(form.names[0])
        self.names = self._functions.names
        self.starts = form.starts
        self.close = form.close

    def read(self, start: str, site: CallSite) -> Reading[bool]:
        """Returns whether it was a call: its first argument or its end tells."""
        form, tape = self._form, site.tape
        tape.keep(start)
        before, after, end = form.function
        is_begun = start == before
        if not is_begun:
            yield from tape.spaces()
            is_begun = not before or bool((yield from tape.take(before)))
        name = (yield from self._name(tape, after)) if is_begun else ""
        is_named = name and site.is_known(name) and (start == form.open or name in self.names)
        if is_named:
            yield from tape.spaces()
        if not is_named or not (yield from tape.peek(*_tags(form.key[0], end, form.close, "{"))):
            return site.end()
        site.start(name)
        call = _TaggedCall(form, tape, site.found, self._functions.parameters(name))
        yield from call.read()
        return True

    def _name(self, tape: Tape, after: str) -> Reading[str]:
        """Reads a function's name and the text after it. Returns "" if there is none."""
        name = yield from tape.run(self._pattern, lark.MAX_NAME_LEN)
        if len(name) > lark.MAX_NAME_LEN or (after and not (yield from tape.take(after))):
            return ""
        return name if name in self.names else name.strip()


class _TaggedCall:
    """Reads one call after its function's name."""

    def __init__(
        self, form: TaggedCalls, tape: Tape, found: FoundEvents, schema: Parameters
    ) -> None:
        self._form = form
        self._tape = tape
        self._found = found
        self._schema = schema
        self._pattern = re.compile(form.names[1])
        self._given: set[str] = set()
        after = form.key[1]
        names = [name + after for name in schema.named if self._pattern.fullmatch(name)]
        self._names = ManyTexts(names if form.line else ())
        """Ends of the tags of arguments, which end a value that is not closed."""

    def read(self) -> Reading[None]:
        """Reads the arguments. Text between them becomes content."""
        form, tape, found = self._form, self._tape, self._found
        ends = (*_tags(form.function[2]), form.close, *form.starts)
        if (yield from tape.peek("{")):  # all arguments as one object, as models also write them
            yield from value(tape, found.arguments, ends, is_object=True)
            self._end((yield from tape.until(found.content, *ends)))
            return
        mark = form.value[1]
        while mark == form.value[1]:
            mark = yield from tape.until(found.content, form.key[0], *ends)
            if mark == form.key[0]:
                mark = yield from self._argument()
        if mark or not tape.is_cut:
            found.arguments("}" if self._given else "{}")
        self._end(mark)

    def _end(self, mark: str) -> None:
        if mark == self._form.close:
            self._found.end_call()
        elif mark != self._form.function[2]:
            self._tape.unread(mark)

    def _argument(self) -> Reading[str]:
        """Reads an argument after the beginning of its first tag. Returns the tag that ended it."""
        tape, form, found = self._tape, self._form, self._found
        before, after = form.key
        key = yield from tape.run(self._pattern, lark.MAX_NAME_LEN)
        text = before + key
        is_whole = len(key) <= lark.MAX_NAME_LEN and (yield from tape.take(after))
        if is_whole and form.value[0]:
            text += after
            yield from tape.spaces()
            is_whole = yield from tape.take(form.value[0])
        if not is_whole:
            found.content(text)
            return form.value[1]
        key = key if key in self._schema.named else key.strip()
        found.arguments(f"{', ' if self._given else '{'}{quoted(key)}: ")
        self._given.add(key)
        if form.line:
            yield from tape.take(form.line)
        its = self._schema.value(key)
        return (yield from (self._string() if its.is_text else self._other(its)))

    def _string(self) -> Reading[str]:
        """Passes on a string as it comes. Returns the tag that ended it."""
        give = self._found.arguments
        give('"')
        end = yield from self._rest(TextLine(lambda piece: give(inside(piece))), has_tags=True)
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
            yield from bracketed(tape, text.give, _tags(form.value[1], form.function[2]))
        end = yield from self._rest(text, has_tags=its.has_strings)
        whole = "".join(pieces)
        is_over = end or not tape.is_cut
        self._found.arguments(its.of_text(whole) if is_over else whole.strip())
        return end

    def _rest(self, text: TextLine, *, has_tags: bool) -> Reading[str]:
        """Passes on the rest of a value. Returns the tag that ended it, or "". With `has_tags` a
        tag may be part of the value; the text around it decides."""
        end = yield from self._end_of_value(text, has_tags=has_tags)
        text.release(without=self._form.line)
        return end

    def _end_of_value(self, text: TextLine, *, has_tags: bool) -> Reading[str]:
        tape, form = self._tape, self._form
        heads = (form.key[0],) if form.line else ()
        while mark := (yield from tape.until(text.give, *form.closes, *heads)):
            is_new = bool(text.last) and text.is_new
            if mark in heads:
                head = yield from tape.peek_one(self._names)
                is_head = bool(head) or not self._names.longest  # any, if none is named
                is_free = is_new and head.removesuffix(form.key[1]) not in self._given
                if is_head and (is_free or not has_tags):
                    tape.unread(mark)
                    return form.value[1]
                text.give(mark)
                continue
            if not has_tags:
                return mark
            after = yield from tape.spaces()
            options = form.following(mark)
            if (mark != form.close or is_new or not form.line) and (
                (yield from tape.peek(*options)) or tape.may_start(*options)
            ):
                return mark
            text.give(mark + after)
        return ""
