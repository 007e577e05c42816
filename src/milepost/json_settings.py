"""Settings that are JSON objects, given as a dataclass, a mapping or text.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from milepost.errors import ConfigError

T = TypeVar("T")


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
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}={value!r}: not JSON ({error})") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name}={value!r}: use a JSON object")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is none of these."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: use one of {', '.join(choices)}")
