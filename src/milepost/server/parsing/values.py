"""The parameters of a function, and what a text means as the value of one.

Between two tags a string stands as it is, and everything else as a literal. The parameter's schema
decides what a text means: `123` is a number if numbers are allowed, and a string if only strings
are. If both are allowed it is the number. Literals may be JSON's or Python's; one that had to be
guessed (`TRUE`, `+7`, a line break in a string) counts only if the schema asks for its type.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.scanning import literal, loaded
from milepost.server.parsing.schemas import (
    Leaf,
    Root,
    Schema,
    TooLargeError,
    carried,
    leaves,
    required_of,
    resolved,
)
from milepost.server.parsing.strings import quoted

_PYTHON = {"None": "null", "True": "true", "False": "false"}
_BRACKETS = {"array": "[", "object": "{"}


class Value:
    """The values that a parameter may have. `root` is the schema of all arguments."""

    def __init__(self, schema: Any, root: Root) -> None:
        self._schema = schema if isinstance(schema, dict) else {}
        self._root = root

    @cached_property
    def _leaves(self) -> list[Leaf]:
        return leaves(self._schema, self._root)

    @cached_property
    def _strings(self) -> list[Leaf]:
        return [leaf for leaf in self._leaves if leaf.kind in ("string", "any")]

    @cached_property
    def _others(self) -> list[Leaf]:
        return [leaf for leaf in self._leaves if leaf.kind not in ("string", "any")]

    # --- reading ----------------------------------------------------------------------------------

    @property
    def is_text(self) -> bool:
        """Whether every text is taken as a string."""
        return not self._others

    @property
    def has_strings(self) -> bool:
        return bool(self._strings)

    @cached_property
    def brackets(self) -> str:
        """Characters that begin a value which is read as JSON up to its end."""
        kinds = {leaf.kind for leaf in self._others}
        return "".join(mark for kind, mark in _BRACKETS.items() if kind in kinds)

    def of_text(self, text: str) -> str:
        """Returns the JSON of a text between two tags: a string if it means no other value."""
        found = None if self.is_text else literal(text)
        if found is None or not found.is_whole:
            return quoted(text)
        if self._allows(found.json) and (found.is_exact or not self._strings):
            return found.json
        return found.json if found.is_exact and not self._strings else quoted(text)

    def of_literal(self, text: str, *, is_cut: bool = False) -> str:
        """Returns the JSON of a literal, whose quotes say whether it is a string; a text that is no
        literal becomes a string. With `is_cut`, an unfinished literal stays unfinished."""
        found = literal(text, is_python=True, is_cut=is_cut)
        if found is not None and (found.is_exact or not found.is_whole or self._allows(found.json)):
            return found.json
        text = text.strip()
        if not is_cut:
            return quoted(text)
        return quoted(text)[:-1] if text else ""

    def _allows(self, text: str) -> bool:
        """Returns whether a JSON text is an allowed value other than a string."""
        value = loaded(text)
        return any(_fits(value, leaf) for leaf in self._others) and (
            value is not None or text == "null"
        )

    # --- grammar ----------------------------------------------------------------------------------

    def json_rule(self, *, is_strict: bool) -> str:
        """Returns a rule for the values as JSON."""
        return lark.json_value(carried(self._schema, self._root), is_strict=is_strict)

    def rules(self, rule: str, end: str, barred: str, *, is_strict: bool) -> list[str]:
        """Returns rules; `rule` matches a text of this value, followed by `end`, and no string
        in it matches `barred`. `of_text` reads whatever they accept as a value that the schema
        allows."""
        free = [leaf for leaf in self._strings if not leaf.is_literal]
        literals = [leaf.schema["const"] for leaf in self._strings if leaf.is_literal]
        options = [lark.text(text + end) for text in literals if not re.search(barred, text)]
        rules = []
        for number, leaf in enumerate(free):
            options.append(f"{rule}_t{number}")
            rules += self._text_rules(options[-1], leaf, end, barred)
        # a lexeme of text matches longer than one of a number, so it includes the scalars
        others = [leaf for leaf in self._others if not free or leaf.kind in _BRACKETS]
        if others:
            values = " | ".join(self._json_options(others, is_strict=is_strict))
            options.append(f"({values}) {lark.text(end)}")
        return [f"{rule}: {' | '.join(options)}", *rules]

    def _json_options(self, others: Sequence[Leaf], *, is_strict: bool) -> list[str]:
        """Returns rules for the values as JSON, or as the words that stand for JSON's."""
        schema = {"anyOf": [leaf.schema for leaf in others]} if self._strings else self._schema
        words = [
            lark.text(word)
            for word, plain in _PYTHON.items()
            if any(_fits(json.loads(plain), leaf) for leaf in others)
        ]
        return [lark.json_value(carried(schema, self._root), is_strict=is_strict), *words]

    def _text_rules(self, rule: str, leaf: Leaf, end: str, barred: str) -> list[str]:
        """Returns rules for a string that this leaf allows and no other value takes, or for a
        scalar of another leaf."""
        parts = [lark.regex("(?s:.*)"), "~" + lark.regex(f"(?s:.*)(?:{barred})(?s:.*)")]
        low, high = leaf.schema.get("minLength", 0), leaf.schema.get("maxLength", "")
        if low or high != "":
            parts.append(lark.regex(f"(?s:.{{{low},{high}}})"))
        pattern = lark.search_regex(leaf.schema.get("pattern"))
        parts += [pattern] if pattern else []
        if self.brackets:
            parts.append(lark.regex(rf"\s*([^\s{re.escape(self.brackets)}](?s:.*))?"))
        scalars = [lark.regex(pattern) for other in self._others for pattern in _scalar(other)]
        name, lexeme = rule.upper(), " & ".join(parts)
        return [
            f"{rule}[lazy]: {name} {lark.text(end)}",
            f"{name}: {' | '.join([f'({lexeme})', *scalars])}",
        ]


_WHOLE = r"-?(0|[1-9][0-9]*)"
_SCALARS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": _WHOLE,
    "number": rf"{_WHOLE}(\.[0-9]+)?([eE][-+]?[0-9]+)?",
}


def _scalar(leaf: Leaf) -> list[str]:
    """Returns a pattern of a scalar other than a string, without bounds."""
    if leaf.is_literal and leaf.kind not in _BRACKETS:
        return [re.escape(json.dumps(leaf.schema["const"]))]
    return [_SCALARS[leaf.kind]] if leaf.kind in _SCALARS else []


def _fits(value: Any, leaf: Leaf) -> bool:
    """Returns whether a value has this type, and is within its bounds."""
    if leaf.is_literal:
        literal = leaf.schema["const"]
        return isinstance(value, bool) == isinstance(literal, bool) and value == literal
    if leaf.kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    match leaf.kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and _is_within(value, leaf.schema)
        case "number":
            return type(value) in (int, float) and _is_within(value, leaf.schema)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


_BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: _is_multiple(value, step),
}


def _is_multiple(value: float, step: float) -> bool:
    try:
        return step != 0 and value % step == 0
    except OverflowError:  # an integer too large for a float
        return False


def _is_within(value: float, schema: Schema) -> bool:
    bounds = ((holds, schema[name]) for name, holds in _BOUNDS.items() if name in schema)
    return all(type(b) not in (int, float) or holds(value, b) for holds, b in bounds)


class Parameters:
    """The schema of a function's arguments, by parameter."""

    def __init__(self, schema: Schema) -> None:
        root = Root(schema)
        try:
            whole = resolved(schema, root)
        except TooLargeError:
            whole = {}
        given = whole.get("properties")
        given = given if isinstance(given, Mapping) else {}
        self.required = required_of(whole)
        self.named = {name: Value(its, root) for name, its in given.items()}
        more = whole.get("additionalProperties", not given)
        self.others = None if more is False else Value(more, root)

    def value(self, name: str) -> Value:
        return self.named.get(name) or self.others or Value({}, Root({}))


class Functions:
    """The functions that a request lists; nothing is known of any other."""

    def __init__(self, tools: lark.Tools) -> None:
        self._schemas = {tool["function"]["name"]: lark.parameters(tool) for tool in tools}
        self._known: dict[str, Parameters] = {}
        self.names = frozenset(self._schemas)

    def parameters(self, name: str) -> Parameters:
        if name not in self._known:
            self._known[name] = Parameters(self._schemas.get(name, {}))
        return self._known[name]
