"""Values written as text between two tags: strings as they are, all else as JSON.

What a text means depends on the parameter's schema: `123` is a number where numbers are allowed,
and a string where only strings are. Where both are, it is the number. A literal of the schema is
that literal; `True`, `False` and `None`, which templates write too, are what they say.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parsing.json_text import loaded
from milepost.server.parsing.schemas import Leaf, Schema, carried, leaves

_PYTHON = {"None": "null", "True": "true", "False": "false"}
_BRACKETS = {"array": "[", "object": "{"}


class Value:
    """What a parameter may be. `root` is the schema of all arguments."""

    def __init__(self, schema: Any, root: Schema) -> None:
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
        """With one of these begins a value that is read as JSON up to its end."""
        kinds = {leaf.kind for leaf in self._others}
        return "".join(mark for kind, mark in _BRACKETS.items() if kind in kinds)

    def as_json(self, text: str) -> str:
        """A text as the JSON of the value that it means; a string if it means no other."""
        if self.is_text:
            return _quoted(text)
        plain = text.strip()
        plain = _PYTHON.get(plain, plain)
        value = loaded(plain)
        is_json = value is not None or plain == "null"
        if is_json and any(_fits(value, leaf) for leaf in self._others):
            return plain
        if self._strings:
            return _quoted(text)
        if not is_json:
            return _mended(plain) or _quoted(text)
        return plain

    # --- grammar ----------------------------------------------------------------------------------

    def rules(self, rule: str, end: str, barred: str, *, is_strict: bool) -> list[str]:
        """`rule` is a text of this value, followed by `end`; no string in it matches `barred`.

        Whatever they accept, `as_json` reads as a value that the schema allows.
        """
        free = [leaf for leaf in self._strings if not leaf.is_literal]
        literals = [leaf.schema["const"] for leaf in self._strings if leaf.is_literal]
        options = [lark.text(text + end) for text in literals if not re.search(barred, text)]
        rules = []
        for number, leaf in enumerate(free):
            options.append(f"{rule}_t{number}")
            rules += self._text_rules(options[-1], leaf, end, barred)
        # a text's lexeme goes on where a number's would end, so it holds the scalars too
        others = [leaf for leaf in self._others if not free or leaf.kind in _BRACKETS]
        if others:
            own = " | ".join(self._json_options(others, is_strict=is_strict))
            options.append(f"({own}) {lark.text(end)}")
        return [f"{rule}: {' | '.join(options)}", *rules]

    def _json_options(self, others: Sequence[Leaf], *, is_strict: bool) -> list[str]:
        """As JSON, or as the words that stand for JSON's."""
        schema = {"anyOf": [leaf.schema for leaf in others]} if self._strings else self._schema
        words = [
            lark.text(word)
            for word, plain in _PYTHON.items()
            if any(_fits(json.loads(plain), leaf) for leaf in others)
        ]
        return [lark.json_value(carried(schema, self._root), is_strict=is_strict), *words]

    def _text_rules(self, rule: str, leaf: Leaf, end: str, barred: str) -> list[str]:
        """A string that this leaf allows and that no other takes; or a scalar of another."""
        parts = [lark.regex("(?s:.*)"), "~" + lark.regex(f"(?s:.*)(?:{barred})(?s:.*)")]
        low, high = leaf.schema.get("minLength", 0), leaf.schema.get("maxLength", "")
        if low or high != "":
            parts.append(lark.regex(f"(?s:.{{{low},{high}}})"))
        pattern = lark.search_regex(leaf.schema.get("pattern"))
        parts += [pattern] if pattern else []
        if self.brackets:
            parts.append(lark.regex(rf"\s*([^\s{re.escape(self.brackets)}](?s:.*))?"))
        scalars = [lark.regex(pattern) for other in self._others for pattern in _scalar(other)]
        name, own = rule.upper(), " & ".join(parts)
        return [
            f"{rule}[lazy]: {name} {lark.text(end)}",
            f"{name}: {' | '.join([f'({own})', *scalars])}",
        ]


_WHOLE = r"-?(0|[1-9][0-9]*)"
_SCALARS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": _WHOLE,
    "number": rf"{_WHOLE}(\.[0-9]+)?([eE][-+]?[0-9]+)?",
}


def _scalar(leaf: Leaf) -> list[str]:
    """A pattern of a scalar that is no string; bounds are not part of it."""
    if leaf.is_literal and leaf.kind not in _BRACKETS:
        return [re.escape(json.dumps(leaf.schema["const"]))]
    return [_SCALARS[leaf.kind]] if leaf.kind in _SCALARS else []


def _fits(value: Any, leaf: Leaf) -> bool:
    """Whether a value is of this type, and within its bounds."""
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


_BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: _is_multiple(value, step),
}


def _is_multiple(value: float, step: float) -> bool:
    try:
        return step != 0 and value % step == 0
    except OverflowError:  # an integer that no float holds
        return False


def _is_within(value: float, schema: Schema) -> bool:
    bounds = ((holds, schema.get(name)) for name, holds in _BOUNDS.items())
    return all(type(b) not in (int, float) or holds(value, b) for holds, b in bounds)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _mended(text: str) -> str | None:
    """The JSON that a text means which has line breaks inside strings, as models write them."""
    value = loaded(text, strict=False)
    try:
        return None if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
