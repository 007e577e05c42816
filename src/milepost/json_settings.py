"""Settings that are JSON objects, given as a dataclass, a mapping or text.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from milepost.errors import ConfigError

T = TypeVar("T")

MAX_DEPTH = 64
"""Of objects and lists inside each other: published files have six."""

_FLOAT = "__float__"
"""How transformers writes numbers that JSON does not have."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json(name: str, kind: type[T], value: object) -> T | None:
    """A configuration from itself, a mapping or its JSON. Raises ConfigError."""
    if isinstance(value, kind):
        return value
    given = read_mapping(name, value)
    if given is None:
        return None
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for each in given:
        if each not in names:
            raise ConfigError(f"{name}: unknown field {each!r}: use {', '.join(names)}")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def read_mapping(name: str, value: object) -> Mapping[str, Any] | None:
    """A mapping from itself or its JSON; None for nothing. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={value!r}: not JSON ({error})") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name}={value!r}: use a JSON object")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is none of these."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: use one of {', '.join(choices)}")


def decode_floats(content: dict[str, Any]) -> None:
    """Put numbers in place of their names, in all of a JSON object; raises ValueError for one that
    is nested too deeply."""
    todo: list[tuple[Any, int]] = [(content, 1)]
    while todo:
        holder, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(value, dict) and list(value) == [_FLOAT]:
                holder[key] = _float(value[_FLOAT])
            elif isinstance(value, dict | list):
                todo.append((value, depth + 1))


def encode_floats(value: Any) -> Any:
    """A copy of JSON values, in which infinity is what `decode_floats` reads."""
    if isinstance(value, Mapping):
        return {key: encode_floats(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode_floats(each) for each in value]
    if isinstance(value, float) and math.isinf(value):
        return {_FLOAT: "Infinity" if value > 0 else "-Infinity"}
    return value


def _float(name: object) -> float:
    if not isinstance(name, str) or name not in _FLOATS:
        raise ValueError(f"{_FLOAT} is {name!r}: it should be one of {', '.join(_FLOATS)}")
    return _FLOATS[name]
