"""Calls written as in Python, with keywords.

    <|tool_call_start|>[f(a=1, s='x'), g()]<|tool_call_end|>

Values are literals of Python or JSON. Each is passed on when it is complete. In a required call
they are JSON, which every reader understands.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidRequestError
from milepost.server.parsing import lark
from milepost.server.parsing.events import FoundEvents
from milepost.server.parsing.json_text import Give, loaded
from milepost.server.parsing.schemas import carried, required_of, resolved
from milepost.server.parsing.tape import Reading, Tape, one, run, spaces, tags, take, until

MAX_NAME_LEN = 1024
_BETWEEN = re.compile(r"[\s,]*")
_NAME = re.compile(r"[^\s=(),'\"\[\]{}<>]*")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls:
    """Tags of a family."""

    open: str
    close: str
    layout: tuple[str, str, str]
    """What stands before the first call, between two, and behind the last."""
    signs: tuple[str, ...]

    def reader(self, tools: lark.Tools) -> _PythonicReader:  # noqa: ARG002 - as other formats
        return _PythonicReader(self)

    # --- grammar ----------------------------------------------------------------------------------

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> list[str]:
        """Rules of which `calls` is the whole."""
        names = [f"tool{i}" for i in range(len(tools))]
        before, between, after = (lark.text(part) for part in self.layout)
        more = "" if is_single else f"({between} call)*"
        rules = [
            f"calls: {tag(self.open)} {before} call {more} {after} {tag(self.close)}",
            f"call: {' | '.join(names)}",
        ]
        for rule, tool in zip(names, tools, strict=True):
            rules += _function(rule, tool)
        return rules


def _function(rule: str, tool: Mapping[str, Any]) -> list[str]:
    """Parameters in the order of the schema; those that are not required may be left out."""
    schema = lark.parameters(tool)
    whole = resolved(schema, schema)
    given = whole.get("properties")
    named = given if isinstance(given, Mapping) else {}
    strictly = {"is_strict": lark.is_strict(tool)}
    head = lark.text(_checked(tool["function"]["name"]) + "(")
    if not named and whole.get("additionalProperties", True) is not False:
        more = whole.get("additionalProperties", True)
        value = lark.json_value(
            carried(more if isinstance(more, Mapping) else {}, schema), **strictly
        )
        key = "/[A-Za-z_][A-Za-z0-9_]*/"
        return [
            f'{rule}: {head} ({rule}_p (", " {rule}_p)*)? ")"',
            f'{rule}_p: {key} "=" {value}',
        ]
    rules = [f'{rule}: {head} {rule}_f0 ")"']
    required = required_of(whole)
    for i, (name, its) in enumerate(named.items()):
        own, first, more = f"{rule}_p{i}", f"{rule}_f{i + 1}", f"{rule}_m{i + 1}"
        sub = carried(its if isinstance(its, Mapping) else {}, schema)
        rules.append(f"{own}: {lark.text(_checked(name) + '=')} {lark.json_value(sub, **strictly)}")
        skip, mark = ("", "") if name in required else (f" | {first}", "?")
        rules.append(f"{rule}_f{i}: {own} {more}{skip}")
        rules.append(f'{rule}_m{i}: (", " {own}){mark} {more}')
    return [*rules, f'{rule}_f{len(named)}: ""', f'{rule}_m{len(named)}: ""']


def _checked(name: str) -> str:
    if not name or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LEN:
        raise InvalidRequestError(f"tools: this model cannot write the name {name!r}")
    return name


class _PythonicReader:
    """Reads the calls of one answer."""

    def __init__(self, form: PythonicCalls) -> None:
        self.starts = (form.open,)
        self.close = form.close

    def read(self, tape: Tape, found: FoundEvents, start: str) -> Reading[bool]:
        seen = start + (yield from spaces(tape))
        seen += yield from take(tape, tags("["))
        num_calls = 0
        while True:
            seen += yield from run(tape, _BETWEEN)
            name = yield from run(tape, _NAME, MAX_NAME_LEN)
            is_name = 0 < len(name) <= MAX_NAME_LEN
            mark = (yield from take(tape, tags("("))) if is_name else ""
            if not mark:
                found.content(name if num_calls else seen + name)
                yield from take(tape, tags("]"))
                return num_calls > 0
            num_calls += 1
            found.start(name)
            if not (yield from self._arguments(tape, found)):
                return True
            found.end_call()

    def _arguments(self, tape: Tape, found: FoundEvents) -> Reading[bool]:
        """Whether the call ended. One that is cut off, or has no keywords, stays unfinished."""
        before = "{"
        while True:
            yield from run(tape, _BETWEEN)
            if (yield from take(tape, tags(")"))):
                found.arguments("{}" if before == "{" else "}")
                return True
            key = yield from run(tape, _NAME, MAX_NAME_LEN)
            yield from spaces(tape)
            if not key or len(key) > MAX_NAME_LEN or not (yield from take(tape, tags("="))):
                return False
            pieces: list[str] = []
            yield from spaces(tape)
            is_whole = yield from _value(tape, pieces.append, self.close)
            text = "".join(pieces)
            found.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            found.arguments(as_json(text) if is_whole else text)
            if not is_whole:
                return False
            before = ", "


def _value(tape: Tape, give: Give, close: str) -> Reading[bool]:
    """Pass on a literal, up to the comma or parenthesis behind it; whether it ended there."""
    marks = tags("'", '"', "(", "[", "{", ")", "]", "}", ",", close)
    depth = 0
    while mark := (yield from until(tape, marks, give)):
        is_over = not depth and mark in ",)]}"
        if mark == close or is_over:
            tape.unread(mark)
            return is_over and mark in ",)"
        give(mark)
        if mark in "'\"":
            if not (yield from _string(tape, give, mark)):
                return False
        elif mark != ",":
            depth += 1 if mark in "([{" else -1
    return False


def _string(tape: Tape, give: Give, quote: str) -> Reading[bool]:
    """A string behind its opening quote, the closing one included."""
    marks = tags(quote, "\\")
    while mark := (yield from until(tape, marks, give)):
        give(mark)
        if mark == quote:
            return True
        give((yield from one(tape)))
    return False


def as_json(text: str) -> str:
    """The JSON of a literal; of what is none, a string."""
    text = text.strip()
    if loaded(text) is not None or text == "null":
        return text
    value = _read(text)
    try:
        told = json.dumps(value, ensure_ascii=False, allow_nan=False)
        told.encode()
    except UnicodeEncodeError:  # half of a character
        return json.dumps(value)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return told


def _read(text: str) -> Any:
    """The value of Python's literal, also of one with line breaks inside strings."""
    for source in (text, text.replace("\r", "\\r").replace("\n", "\\n")):
        try:
            return _plain(ast.parse(source, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return text


def _plain(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for what is none."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            return constant
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _plain(its) for key, its in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    key = _plain(node) if node is not None else None
    if not isinstance(key, str):
        raise ValueError("no key of an object")
    return key
