"""Tool calls between <tool_call> and </tool_call>, in the two forms that the Qwen family writes.

    hermes      <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_xml   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>

`Calls` finds the calls in the content; a *body* reads the inside of one. Arguments are given as
they come, as JSON text. What turns out to be no call is given as the content that it is. White
space around calls is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from milepost.server.parsing.events import CallArguments, CallStart, Content, Event, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Body(Protocol):
    """The inside of one call."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self, *, is_closed: bool) -> list[Event]:
        """The rest; as Content, tags included, if no call could be made out at all."""


class Calls:
    """Finds calls in the content of one answer."""

    def __init__(self, make_body: Callable[[], Body]) -> None:
        self._make_body = make_body
        self._body: Body | None = None
        self._buffer = ""
        self._has_calls = False

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        if self._body is not None:
            events = self._body.feed(self._buffer) + self._body.finish(is_closed=False)
        else:
            text = self._buffer if not self._has_calls else self._buffer.lstrip()
            events = [Content(text)] if text else []
        self._body, self._buffer = None, ""
        return events

    def _advance(self, events: list[Event]) -> bool:
        """Handle the buffer up to the next tag; whether there was one."""
        tag = OPEN if self._body is None else CLOSE
        end = self._buffer.find(tag)
        if end < 0:
            self._give(events, len(self._buffer) - self._num_held(tag))
            return False
        if self._body is None:
            text = self._buffer[:end].rstrip()
            self._body = self._make_body()
            self._has_calls = True
            events += [Content(text)] if text else []
        else:
            events += self._body.feed(self._buffer[:end]) + self._body.finish(is_closed=True)
            self._body = None
        self._buffer = self._buffer[end + len(tag) :]
        return True

    def _num_held(self, tag: str) -> int:
        num_held = held_back(self._buffer, (tag,))
        if self._body is None:  # white space before a call is dropped
            kept = self._buffer[: len(self._buffer) - num_held]
            num_held += len(kept) - len(kept.rstrip())
        return num_held

    def _give(self, events: list[Event], length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if not text:
            return
        if self._body is not None:
            events += self._body.feed(text)
            return
        text = text.lstrip() if self._has_calls else text
        events += [Content(text)] if text else []


class NoCalls:
    """Content stays content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


# --- JSON -----------------------------------------------------------------------------------------

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class HermesBody:
    """{"name": ..., "arguments": {...}}; arguments stream once the name is known."""

    def __init__(self) -> None:
        self._text = ""
        self._value: _Value | None = None

    def feed(self, text: str) -> list[Event]:
        if self._value is not None:
            return self._arguments(text)
        self._text += text
        head = _HEAD.match(self._text)
        name = _loaded(head.group(1)) if head else None
        if head is None or not isinstance(name, str):
            return []
        self._value = _Value()
        return [CallStart(name), *self._arguments(self._text[head.end() :])]

    def _arguments(self, text: str) -> list[Event]:
        assert self._value is not None
        piece = self._value.take(text)
        return [CallArguments(piece)] if piece else []

    def finish(self, *, is_closed: bool) -> list[Event]:
        if self._value is not None:
            return []
        call = _loaded(self._text.strip())
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return [Content(OPEN + self._text + CLOSE * is_closed)]
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [CallStart(call["name"]), CallArguments(text)]


class _Value:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = self._is_over = False

    def take(self, text: str) -> str:
        """The part of `text` that belongs to the object."""
        if self._is_over:
            return ""
        for position, character in enumerate(text):
            self._step(character)
            if self._is_over:
                return text[: position + 1]
        return text

    def _step(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = character == "\\"
            self._is_string = character != '"'
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._is_over = self._depth == 0


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- tags -----------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)

Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> parameter name -> JSON schema."""


class XmlBody:
    """<function=f><parameter=a>...; each parameter is given when it is whole.

    A value is text; where the tool's schema says that it is no string, it is read as JSON.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._all = ""
        self._rest = ""
        self._name: str | None = None
        self._num_parameters = 0

    def feed(self, text: str) -> list[Event]:
        self._all += text
        self._rest += text
        events: list[Event] = []
        if self._name is None:
            head = _FUNCTION.match(self._rest)
            if head is None:
                return []
            self._name = head.group(1).strip()
            self._rest = self._rest[head.end() :]
            events.append(CallStart(self._name))
        while found := _PARAMETER.match(self._rest):
            self._rest = self._rest[found.end() :]
            events.append(self._parameter(found.group(1).strip(), found.group(2)))
        return events

    def finish(self, *, is_closed: bool) -> list[Event]:
        if self._name is None:
            return [Content(OPEN + self._all + CLOSE * is_closed)]
        if not is_closed and "</function>" not in self._rest:
            return []  # cut off: the arguments stay as unfinished as they are
        return [CallArguments("}" if self._num_parameters else "{}")]

    def _parameter(self, name: str, text: str) -> Event:
        value = text.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._name or "", {}).get(name, {})
        comma = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        return CallArguments(f"{comma}{json.dumps(name)}: {_as_json(value, schema)}")


def _as_json(text: str, schema: Mapping[str, Any]) -> str:
    """A parameter's text as a JSON value of the type that the schema names."""
    if _is_string(schema):
        return json.dumps(text, ensure_ascii=False)
    value = _loaded(text.strip())
    if value is None and text.strip() in ("True", "False"):
        value = text.strip() == "True"
    if value is None and text.strip() not in ("null", "None"):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _is_string(schema: Mapping[str, Any]) -> bool:
    """Whether a value is taken as text: by its schema, or because there is none."""
    if not isinstance(schema, Mapping) or not schema:
        return True
    kind = schema.get("type")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
