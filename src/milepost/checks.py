"""Reads and checks what callers set: settings, which raise ConfigError, and the values of a
request, which raise InvalidRequestError. Settings that are JSON objects may be a dataclass, a
mapping or text.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, NoReturn, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from milepost.errors import ConfigError, InvalidRequestError

T = TypeVar("T")

MAX_DEPTH = 64
"""Deepest nesting of objects and lists; published files have six levels."""

_FLOAT = "__float__"
"""Key for numbers missing from JSON, such as infinity, as transformers writes them."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json(name: str, kind: type[T], value: object) -> T | None:
    """Returns a configuration of type `kind`, given as such, as a mapping or as JSON. Raises
    ConfigError."""
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
    """Reads a mapping from itself or its JSON; None for None. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={value!r}: not JSON ({error})") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name}={value!r}: use a JSON object")
    return value


def require(holds: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not holds:
        raise ConfigError(message)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: use one of {', '.join(choices)}")


def check_types(settings: object) -> None:
    """Raises ConfigError unless each field of a dataclass has its declared type; a string is never
    taken for a boolean, nor a boolean for a number."""
    for name, wanted in _types_of(type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if get_origin(wanted) is Literal:
            check_choice(name, value, get_args(wanted))
            continue
        members = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
        kinds = tuple(get_origin(member) or member for member in members)
        allowed = (*kinds, int) if float in kinds else kinds
        is_stray_bool = isinstance(value, bool) and bool not in kinds
        if not isinstance(value, allowed) or is_stray_bool:
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name}={value!r}: use {names}")


@cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def decode_floats(content: dict[str, Any]) -> None:
    """Replaces marked numbers by floats anywhere in a JSON object. Raises ValueError if it is
    nested too deeply."""
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
    """Returns a copy of JSON values with infinities marked, as `decode_floats` reads them."""
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


def json_text(name: str, given: object) -> str | None:
    """Returns the JSON text of an object or of its JSON text, or None if it sets nothing. Raises
    ConfigError."""
    content = read_mapping(name, given)
    if content is None:
        return None
    try:
        text = json.dumps(encode_floats(content), sort_keys=True, allow_nan=False)
        decode_floats(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={given!r}: not JSON ({error})") from error
    return text if content else None


def flat_texts(given: Sequence[str] | None) -> list[str]:
    """Returns the texts, each JSON list replaced by its members, as vLLM's flags accept them.
    Raises ConfigError."""
    found: list[str] = []
    for text in given or ():
        if not text.startswith("["):
            found.append(text)
            continue
        try:
            found += [str(one) for one in json.loads(text)]
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{text!r}: this is not a JSON list: {error}") from error
    return found


def refuse(name: str, value: object, instead: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={value!r}: use {instead}")


def listed(name: str, values: object) -> tuple[Any, ...]:
    """Returns the values as a tuple. A text is not a list of its characters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable | None):
        refuse(name, values, "a list")
    return () if values is None else tuple(values)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(name: str, value: object, low: float, high: float, instead: str) -> None:
    if not is_number(value) or not low <= value <= high:
        refuse(name, value, instead)


def check_int(
    name: str, value: object, low: int, instead: str, *, high: float = float("inf")
) -> None:
    if not is_whole(value) or not low <= value <= high:
        refuse(name, value, instead)


def check_ids(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            refuse(name, token_id, f"token ids below the model's vocabulary of {vocab_size}")


def check_unicode(text: str, name: str = "the text") -> None:
    """Raises InvalidRequestError for a text with unpaired surrogates, which JSON and Python allow:
    neither tokenizers nor digests accept them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid Unicode: use whole characters ({error})"
        ) from error
