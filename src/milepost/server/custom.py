"""Custom tools: the model sees a function with one string, the client gets its text."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from milepost.server.tools import CustomDefinition

FIELD = "input"
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
        "properties": {FIELD: {"type": "string"}},
        "required": [FIELD],
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
        own = found.get(FIELD) if isinstance(found, dict) else None
        if isinstance(own, str):
            return own
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
