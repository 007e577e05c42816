"""Tools of a request, the choice among them, and calls in the history.

A model calls functions. A custom tool, whose input is text, is shown to it as a function with one
string; the client gets its text. Tools that a server runs itself, such as a web search, are left
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import from_json

from milepost.server.bodies import read_json
from milepost.server.fields import AnyType, Body, ToolList, with_type

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def read_arguments(given: Any) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of a call in the history as an object, and whether the call had
    something else.

    Models write calls that are cut off, have raw line breaks in their strings, or are encoded
    twice, and clients send such calls back with every later turn. So arguments are read as far as
    that goes, and the rest is left out. An empty text means no arguments.
    """
    if isinstance(given, dict):
        return given, False
    if not isinstance(given, str):
        return {}, True
    if not given:
        return {}, False
    try:
        found = read_json(given.encode(), allows_nan=True)
    except ValueError:
        found = _partial_json(given)
        return (found if isinstance(found, dict) else {}), True
    if isinstance(found, dict):
        return found, False
    return (read_arguments(found)[0] if isinstance(found, str) and found else {}), True


def _partial_json(text: str) -> Any:
    escaped = _STRING.sub(lambda match: _CONTROL.sub(_escape, match.group()), text)
    try:
        return from_json(escaped, allow_partial="trailing-strings")
    except ValueError:
        return None


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"


class FunctionCall(Body):
    name: str
    arguments: Any = None
    """JSON text, or an object. Kept as an object."""
    _is_changed: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _read_arguments(self) -> FunctionCall:
        given = "" if "arguments" not in self.model_fields_set else self.arguments
        self.arguments, self._is_changed = read_arguments(given)
        return self

    def changed(self) -> Iterator[str]:
        if self._is_changed:
            yield "arguments"


class CustomCall(Body):
    name: str
    input: str | None = None


class ToolCall(Body):
    """A call in the history, of a function or of a custom tool."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    index: int | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> ToolCall:
        if (self.function if self.type == "function" else self.custom) is None:
            raise ValueError(f"a call of type {self.type!r} needs a {self.type}")
        return self


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(Body):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(Body):
    """The form of a custom tool's input. The model is told of it; nothing enforces it."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _has_grammar(self) -> CustomFormat:
        return with_type("grammar", self)

    def changed(self) -> Iterator[str]:
        if self.grammar is not None:
            yield "grammar"


class CustomDefinition(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Body):
    """A function, or a custom tool, whose input is text. Tools of other kinds would run on the
    server; they are left out."""

    type: AnyType
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> Tool:
        if self.type in ("function", "custom") and self.definition is None:
            raise ValueError(f"a tool of type {self.type!r} needs a {self.type}")
        return self

    @property
    def definition(self) -> FunctionDefinition | CustomDefinition | None:
        """None for a tool that is left out."""
        return {"function": self.function, "custom": self.custom}.get(self.type)

    def left_out(self) -> Iterator[str]:
        if self.definition is None:
            yield self.type


class FunctionName(Body):
    name: str


class AllowedTool(Body):
    type: AnyType
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def name(self) -> str | None:
        """The tool's name; None for several, and for a tool that is left out."""
        named = self.function or self.custom
        return None if named is None else named.name


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[ToolList[AllowedTool], Field(min_length=1)]


class NamedToolChoice(AllowedTool):
    """The one tool to call, or with `allowed_tools` those that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> NamedToolChoice:
        if getattr(self, self.type) is None:
            raise ValueError(f"a tool choice of type {self.type!r} needs {self.type}")
        return self

    @property
    def names(self) -> list[str | None]:
        """Names of the tools that may be called; None for one that is left out."""
        allowed = self.allowed_tools
        return [self.name] if allowed is None else [tool.name for tool in allowed.tools]


INPUT = "input"
"""The function's only parameter."""

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_HEAD_LEN = 64
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_TEXT = re.compile(
    r'(?:[^"\\]'  # whole escapes only, and surrogate pairs together
    rf"|{_HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\])|(?=\\[^u]))"
    rf"|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}"
    r"|\\[^u])*+"
)


def as_function(tool: CustomDefinition) -> dict[str, Any]:
    """Returns the tool as a function. The description states the form of the input, since nothing
    enforces it."""
    description = tool.description or ""
    grammar = tool.format.grammar if tool.format is not None else None
    if grammar is not None:
        kind = "this Lark grammar" if grammar.syntax == "lark" else "this regular expression"
        description += f"\n\nThe input matches {kind}:\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": tool.name, "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


class CustomInput:
    """Extracts the input of one call from its arguments as they are written."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""
        self._is_open = False
        self._is_over = False

    def feed(self, text: str) -> str:
        """Returns the new text of the input."""
        self._pieces.append(text)
        if self._is_over:
            return ""
        self._held += text
        if not self._is_open:
            head = _HEAD.match(self._held)
            self._is_over = head is None and len(self._held) > _MAX_HEAD_LEN
            if head is None:
                return ""
            self._is_open = True
            self._held = self._held[head.end() :]
        return self._read()

    def finish(self) -> str:
        """Returns the rest at the end of the call. Arguments in another form are the input as they
        stand, or its only text."""
        if self._is_open:
            return ""
        text = "".join(self._pieces)
        try:
            found = from_json(text)
        except ValueError:
            return text
        values = list(found.values()) if isinstance(found, dict) else []
        value = found.get(INPUT) if isinstance(found, dict) else None
        if isinstance(value, str):
            return value
        return values[0] if len(values) == 1 and isinstance(values[0], str) else text

    def _read(self) -> str:
        match = _TEXT.match(self._held)
        assert match is not None, "no text matches too"
        end = match.end()
        self._is_over = self._held.startswith('"', end)
        self._held = "" if self._is_over else self._held[end:]
        return _unescaped(match.group())


def _unescaped(text: str) -> str:
    try:
        found = json.loads(f'"{text}"', strict=False)
    except ValueError:  # not an escape of JSON
        return text
    return str(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
