"""Follows references in a tool's JSON schema, and lists the alternatives of a parameter.

References (`#/$defs/...`, `#/properties/...`, `#`) point into the schema of all arguments. A
parameter's schema that is used alone takes the definitions it refers to along.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

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


@dataclass(frozen=True, slots=True)
class Leaf:
    """One alternative of a schema: values of one type, or one value (a const)."""

    kind: str
    """A type of JSON schema, or "any"."""
    schema: Schema

    @property
    def is_literal(self) -> bool:
        return "const" in self.schema


def resolved(schema: Any, root: Schema) -> Schema:
    """Returns the schema after following its references; {} if they lead nowhere."""
    seen: set[str] = set()
    resolved: dict[str, Any] = {}
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        resolved = {**schema, **resolved}
        schema = None if reference in seen else pointed(reference, root)
        seen.add(reference)
    resolved.pop("$ref", None)
    resolved.pop("$defs", None)
    return {**schema, **resolved} if isinstance(schema, Mapping) else resolved


def required_of(schema: Schema) -> frozenset[str]:
    """Returns the names that an object must have, none if `required` is not a list of names."""
    names = schema.get("required")
    return frozenset(
        name for name in (names if isinstance(names, list) else ()) if isinstance(name, str)
    )


def pointed(reference: str, root: Schema) -> Any:
    """Returns the target of a reference into `root`, or None."""
    if not reference.startswith("#"):
        return None
    here: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping):
            here = here.get(step)
        elif isinstance(here, list) and _INDEX.fullmatch(step) and int(step) < len(here):
            here = here[int(step)]
        else:
            return None
    return here


def leaves(schema: Any, root: Schema) -> list[Leaf]:
    """Returns the alternatives of a schema."""
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
            branches = _branches(merged)
            todo += reversed(branches)
            found += [] if branches else _plain(merged)
    return found


def _without_reference(schema: Schema, root: Schema) -> Schema:
    target = pointed(schema["$ref"], root)
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return {**target, **beside} if isinstance(target, Mapping) else beside


def _merged(schema: Schema, root: Schema) -> dict[str, Any]:
    """Returns the schema merged with the members of its `allOf`."""
    merged = dict(schema)
    parts = merged.pop("allOf", None)
    for part in parts if isinstance(parts, list) else ():
        for key, value in resolved(part, root).items():
            both = merged.get(key)
            if isinstance(both, dict) and isinstance(value, dict):
                merged[key] = {**both, **value}
            elif key == "required" and isinstance(both, list) and isinstance(value, list):
                merged[key] = [*both, *value]
            else:
                merged.setdefault(key, value)
    return merged


def _branches(schema: Schema) -> list[Any]:
    """Returns the branches of a choice, each with the keywords that hold for all of them."""
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            common = {name: value for name, value in schema.items() if name not in _ASIDE}
            return [
                {**common, **branch} if isinstance(branch, Mapping) else branch
                for branch in branches
            ]
    return []


_ASIDE = frozenset(("anyOf", "oneOf", "$defs", "definitions", "title", "description", "default"))


def _plain(schema: Schema) -> list[Leaf]:
    """Returns the leaves of a schema without branches."""
    literals = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(literals, list):
        return [Leaf(_KIND_OF[type(value)], {"const": value}) for value in literals]
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds:
        is_object = "properties" in schema or "additionalProperties" in schema
        kinds = ["object"] if is_object else ["array"] if "items" in schema else ["any"]
    return [Leaf(str(kind), {**schema, "type": kind}) for kind in kinds]


def carried(schema: Any, root: Schema) -> Schema:
    """Returns the schema with all definitions that it refers to, so that it stands alone."""
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    whole = _rewritten(schema, names)
    while len(definitions) < len(names):
        reference, name = list(names.items())[len(definitions)]
        definitions[name] = _rewritten(pointed(reference, root), names)
    return {**whole, "$defs": definitions} if definitions else whole


def _rewritten(schema: Any, names: dict[str, str]) -> Any:
    """Returns a copy whose references point to numbered definitions; new ones are added to
    `names`."""
    top: list[Any] = [schema]
    todo: list[tuple[Any, Any]] = [(top, 0)]
    while todo:
        holder, place = todo.pop()
        value = holder[place]
        if isinstance(value, Mapping):
            copy: Any = dict(value)
            reference = copy.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                copy["$ref"] = f"#/$defs/{names.setdefault(reference, f'd{len(names)}')}"
            todo += [(copy, key) for key in copy]
        elif isinstance(value, list):
            copy = list(value)
            todo += [(copy, index) for index in range(len(copy))]
        else:
            continue
        holder[place] = copy
    return top[0]
