"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from milepost.engine.constraints import JSON_OPTIONS

Tools = Sequence[Mapping[str, Any]]
"""As a request has them."""

Tag = Callable[[str], str]
"""Writes a tag: as a token where the vocabulary has it as one, else as text."""


def text(literal: str) -> str:
    return json.dumps(literal).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    return f"/{_SLASH.sub(_escaped, pattern)}/"


def search_regex(pattern: object) -> str | None:
    """A regex of the texts in which `pattern`, of a JSON schema, is found.

    None for one that has no such form: with look-around, or anchors inside.
    """
    if not isinstance(pattern, str) or _NOT_REGULAR.search(pattern):
        return None
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start : len(pattern) - end]
    if _ANCHOR.search(inner) or ((start or end) and "|" in inner):
        return None
    try:
        re.compile(inner)
    except (re.error, RecursionError, OverflowError):
        return None
    return regex(f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}")


_SLASH = re.compile(r"\\.|/", re.DOTALL)
_NOT_REGULAR = re.compile(r"\(\?[^:]|\\[bBAZ0-9pPk]")
_ANCHOR = re.compile(r"(?<![\[\\])[\^$]")


def _escaped(match: re.Match[str]) -> str:
    return match.group() if match.group() != "/" else "\\/"


def json_value(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A JSON value of a schema. What llguidance does not know of it is left out unless `is_strict`:
    then the request is refused."""
    options = {**JSON_OPTIONS, "lenient": not is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def names(tools: Tools) -> frozenset[str]:
    """Of the functions."""
    return frozenset(tool["function"]["name"] for tool in tools)
