"""Checks of values that callers pass in. All raise InvalidRequestError, with name and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from milepost.errors import InvalidRequestError


def refuse(name: str, value: object, instead: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={value!r}: use {instead}")


def listed(name: str, values: object) -> tuple[Any, ...]:
    """Returns the values as a tuple. A text is not a list of its characters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable | None):
        refuse(name, values, "a list")
    return tuple(values or ())


def check_number(name: str, value: object, low: float, high: float, instead: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(name, value, instead)


def check_int(
    name: str, value: object, low: int, instead: str, *, high: float = float("inf")
) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        refuse(name, value, instead)


def check_ids(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            refuse(name, token_id, f"token ids below the model's vocabulary of {vocab_size}")


def check_unicode(text: str, name: str = "the text") -> None:
    """Raises InvalidRequestError for a text with halves of characters, as JSON and Python may have:
    neither tokenizers nor digests accept them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid Unicode: use whole characters ({error})"
        ) from error
