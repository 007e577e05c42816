"""Leaves out those formats of strings in a JSON schema that llguidance refuses.

JSON Schema has a `format` say what a string is for, and validators skip those that they do not
know. Schemas that libraries make are full of them: `password`, `binary`, `regex`, `file-path`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ENFORCED: Final = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri",
    "uuid",
))  # fmt: skip
_DATA: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_NAMED: Final = frozenset((
    "$defs", "definitions", "dependentSchemas", "patternProperties", "properties",
))  # fmt: skip
"""Keywords whose values map names to schemas."""


def without_unknown_formats(schema: Any) -> Any:
    """Returns a copy of a schema without the formats that are not enforced."""
    top: list[Any] = [schema]
    todo: list[tuple[Any, Any, bool]] = [(top, 0, True)]
    while todo:
        holder, place, is_schema = todo.pop()
        value = holder[place]
        if isinstance(value, Mapping):
            copy: Any = dict(value)
            format_ = copy.get("format")
            if is_schema and isinstance(format_, str) and format_ not in ENFORCED:
                del copy["format"]
            inside = (key for key in copy if not (is_schema and key in _DATA))
            todo += [(copy, key, not (is_schema and key in _NAMED)) for key in inside]
        elif isinstance(value, list):
            copy = list(value)
            todo += [(copy, index, True) for index in range(len(copy))]
        else:
            continue
        holder[place] = copy
    return top[0]
