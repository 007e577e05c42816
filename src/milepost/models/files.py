"""Reads the small JSON files of a checkpoint, which anybody may have written.

`reading` is the one place that turns whatever reading a checkpoint raises into an error of ours.
What is read is bounded before it is parsed. Imports nothing heavy: a server's HTTP process reads
files too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError, MilepostError, WeightsError

MAX_BYTES = 2**28
"""An index of a million tensors is half as large."""
MAX_DEPTH = 64
"""Of objects and lists inside each other: published files have six."""

Kind = type[ConfigError] | type[WeightsError]

_FLOAT = "__float__"
"""How transformers writes numbers that JSON does not have."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@contextmanager
def reading(what: Path | str, kind: Kind = ConfigError) -> Iterator[None]:
    """Raise `kind`, naming the file, for any error but ours: a library that reads somebody's file
    may fail in any way. What a library in Rust panics with is no Exception."""
    try:
        yield
    except MilepostError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: cannot be read ({_reason(error)})") from error


def read_object(path: Path, kind: Kind = ConfigError) -> dict[str, Any]:
    """The JSON object in a regular file; raises `kind`, naming the file. Numbers that transformers
    writes as `{"__float__": "Infinity"}` are read as numbers."""
    with reading(path, kind):
        if not path.is_file():
            raise kind(f"{path}: {'is no regular file' if path.exists() else 'is missing'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise kind(f"{path}: has {size} bytes, more than {MAX_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
        if not isinstance(content, dict):
            raise kind(f"{path} holds a {type(content).__name__}: it should be a JSON object")
        decode_floats(content)
        return content
    raise AssertionError("reading returns or raises")


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are there once, or with one value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"{name!r} is there twice, as {value!r} and {found[name]!r}")
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "objects and lists are nested too deeply"
    lines = str(error).strip().splitlines()
    message = lines[0].rstrip(".") if lines else ""
    if isinstance(error, OSError | UnicodeError | json.JSONDecodeError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
