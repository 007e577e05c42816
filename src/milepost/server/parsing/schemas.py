"""Follows references in a tool's JSON schema, and lists the alternatives of a parameter.

References (`#/$defs/...`, `#/properties/...`, `#`) point into the schema of all arguments. A
parameter's schema that is used alone takes the definitions it refers to along. Schemas come with
requests, and references and alternatives multiply, so what may be copied is bounded (`Root`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from milepost.errors import InvalidRequestError

Schema = Mapping[str, Any]

_INDEX = re.compile("[0-9]{1,9}")

MAX_ALTERNATIVES = 512
"""Largest number of leaves of one schema; a schema with more counts as anything."""

_KIND_OF = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


MAX_COPIED = 2**18
"""Limit on the copied members of a function's schema, plus the characters of its references. Takes
milliseconds, and some megabytes."""


class TooLargeError(Exception):
    """More would be copied than `MAX_COPIED`."""


class Root:
    """The schema of all arguments of a function, with the number of copies that are left."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._num_left = MAX_COPIED

    def spend(self, num: int) -> None:
        """Counts copies before they are made. Raises TooLargeError."""
        self._num_left -= num
        if self._num_left < 0:
            raise TooLargeError

    def merged(self, *schemas: Schema) -> dict[str, Any]:
        """Returns a schema with the keywords of all; those of later ones win. Raises
        TooLargeError."""
        self.spend(sum(map(len, schemas)))
        return {key: value for schema in schemas for key, value in schema.items()}

    def pointed(self, reference: str) -> Any:
        """Returns the target of a reference, or None. Raises TooLargeError."""
        self.spend(len(reference))
        if not reference.startswith("#"):
            return None
        here: Any = self._schema
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, Mapping):
                here = here.get(step)
            elif isinstance(here, list) and _INDEX.fullmatch(step) and int(step) < len(here):
                here = here[int(step)]
            else:
                return None
        return here


@dataclass(frozen=True, slots=True)
class Leaf:
    """One alternative of a schema: values of one type, or one value (a const)."""

    kind: str
    """A type of JSON schema, or "any"."""
    schema: Schema

    @property
    def is_literal(self) -> bool:
        return "const" in self.schema


def resolved(schema: Any, root: Root) -> Schema:
    """Returns the schema after following its references; {} if they lead nowhere. Raises
    TooLargeError."""
    seen: set[str] = set()
    resolved: dict[str, Any] = {}
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        resolved = root.merged(schema, resolved)
        schema = None if reference in seen else root.pointed(reference)
        seen.add(reference)
    resolved.pop("$ref", None)
    resolved.pop("$defs", None)
    return root.merged(schema, resolved) if isinstance(schema, Mapping) else resolved


def required_of(schema: Schema) -> frozenset[str]:
    """Returns the names that an object must have, none if `required` is not a list of names."""
    names = schema.get("required")
    return frozenset(
        name for name in (names if isinstance(names, list) else ()) if isinstance(name, str)
    )


def leaves(schema: Any, root: Root) -> list[Leaf]:
    """Returns the alternatives of a schema. One that is too large counts as anything."""
    try:
        return _leaves(schema, root)
    except TooLargeError:
        return [Leaf("any", {})]


def _leaves(schema: Any, root: Root) -> list[Leaf]:
    found: list[Leaf] = []
    todo, seen = [schema], set()
    while todo:
        if len(found) + len(todo) > MAX_ALTERNATIVES:
            return [Leaf("any", {})]
        given = todo.pop()
        if not isinstance(given, Mapping):
            found.append(Leaf("any", {}))
        elif isinstance(given.get("$ref"), str):
            if given["$ref"] not in seen:
                seen.add(given["$ref"])
                todo.append(_without_reference(given, root))
        else:
            merged = _merged(given, root)
            branches = _branches(merged, root)
            todo += reversed(branches)
            found += [] if branches else _plain(merged, root)
    return found


def _without_reference(schema: Schema, root: Root) -> Schema:
    target = root.pointed(schema["$ref"])
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return root.merged(target, beside) if isinstance(target, Mapping) else beside


def _merged(schema: Schema, root: Root) -> dict[str, Any]:
    """Returns the schema merged with the members of its `allOf`."""
    merged = root.merged(schema)
    parts = merged.pop("allOf", None)
    for part in parts if isinstance(parts, list) else ():
        for key, value in resolved(part, root).items():
            both = merged.get(key)
            if isinstance(both, dict) and isinstance(value, dict):
                merged[key] = root.merged(both, value)
            elif key == "required" and isinstance(both, list) and isinstance(value, list):
                root.spend(len(both) + len(value))
                merged[key] = [*both, *value]
            else:
                merged.setdefault(key, value)
    return merged


def _branches(schema: Schema, root: Root) -> list[Any]:
    """Returns the branches of a choice, each with the keywords that hold for all of them."""
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            common = {name: value for name, value in schema.items() if name not in _ASIDE}
            return [
                root.merged(common, branch) if isinstance(branch, Mapping) else branch
                for branch in branches
            ]
    return []


_ASIDE = frozenset(("anyOf", "oneOf", "$defs", "definitions", "title", "description", "default"))


def _plain(schema: Schema, root: Root) -> list[Leaf]:
    """Returns the leaves of a schema without branches."""
    literals = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(literals, list):
        return [Leaf(_KIND_OF[type(value)], {"const": value}) for value in literals]
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds:
        is_object = "properties" in schema or "additionalProperties" in schema
        kinds = ["object"] if is_object else ["array"] if "items" in schema else ["any"]
    return [Leaf(str(kind), root.merged(schema, {"type": kind})) for kind in kinds]


def carried(schema: Any, root: Root) -> Schema:
    """Returns the schema with all definitions that it refers to, so that it stands alone. Raises
    InvalidRequestError for one that is too large."""
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    try:
        whole = _rewritten(schema, names, root)
        while len(definitions) < len(names):
            for reference, name in list(names.items())[len(definitions) :]:
                definitions[name] = _rewritten(root.pointed(reference), names, root)
    except TooLargeError:
        raise InvalidRequestError("tools: the parameters of one are too large") from None
    return {**whole, "$defs": definitions} if definitions else whole


def _rewritten(schema: Any, names: dict[str, str], root: Root) -> Any:
    """Returns a copy whose references point to numbered definitions; new ones are added to
    `names`. Raises TooLargeError."""
    top: list[Any] = [schema]
    todo: list[tuple[Any, Any]] = [(top, 0)]
    while todo:
        holder, place = todo.pop()
        value = holder[place]
        if isinstance(value, Mapping):
            root.spend(len(value))
            copy: Any = dict(value)
            reference = copy.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                copy["$ref"] = f"#/$defs/{names.setdefault(reference, f'd{len(names)}')}"
            todo += [(copy, key) for key in copy]
        elif isinstance(value, list):
            root.spend(len(value))
            copy = list(value)
            todo += [(copy, index) for index in range(len(copy))]
        else:
            continue
        holder[place] = copy
    return top[0]
