"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from milepost.errors import InvalidRequestError

Tools = Sequence[Mapping[str, Any]]
"""Tools as chat templates read them."""

MAX_NAME_LEN = 1024
"""Longest name of a function or a parameter that is read."""

Tag = Callable[[str], str]
"""Writes a tag: as a token if the vocabulary has it as one, else as text."""


def writable(name: str, pattern: str) -> str:
    """Returns the name of a function or a parameter. Raises InvalidRequestError if it would not be
    read: readers look for names of this pattern."""
    is_read = re.fullmatch(pattern, name) and name == name.strip()
    if not is_read or len(name) > MAX_NAME_LEN:
        raise InvalidRequestError(f"tools: this model cannot write the name {name!r}")
    return name


def text(literal: str) -> str:
    return json.dumps(literal).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    return f"/{_SLASH.sub(_escaped, pattern)}/"


def search_regex(pattern: object) -> str | None:
    """Returns a regex of the texts that contain a match of a JSON schema's `pattern`, or None if it
    has look-around or inner anchors."""
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
    """Returns a rule for a JSON value of a schema. Keywords that llguidance does not know are
    ignored, or with `is_strict` make it refuse the schema."""
    # imports numpy; --help needs none
    from milepost.engine.constraints import JSON_OPTIONS, without_unknown_formats

    options = {**JSON_OPTIONS, "lenient": not is_strict}
    return f"%json {json.dumps({**without_unknown_formats(schema), 'x-guidance': options})}"


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def arguments(tool: Mapping[str, Any]) -> str:
    """Returns a rule for the arguments of a tool as JSON."""
    return json_value(parameters(tool), is_strict=is_strict(tool))


def parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def numbered(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Returns the tools by the names of their rules."""
    return {f"tool{number}": tool for number, tool in enumerate(tools)}


def names(tools: Tools) -> frozenset[str]:
    """Returns the names of the functions."""
    return frozenset(tool["function"]["name"] for tool in tools)
