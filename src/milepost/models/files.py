"""Reads the small JSON files of a checkpoint, which are untrusted input.

`reading` is the one place that converts errors from reading a checkpoint to Milepost's own. Sizes
are bounded before files are parsed. The module imports nothing heavy, because a server's HTTP
process reads files too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milepost.checks import decode_floats
from milepost.errors import ConfigError, MilepostError, UnsupportedModelError, WeightsError

MAX_BYTES = 2**28
"""Largest file that is read; an index of a million tensors is half as large."""

ErrorKind = type[ConfigError] | type[WeightsError]


@contextmanager
def reading(what: Path | str, kind: ErrorKind = ConfigError) -> Iterator[None]:
    """Raises `kind`, naming the file, for any error but Milepost's own: a library that reads an
    untrusted file may fail in any way. Panics of Rust libraries are caught too, though they are no
    Exception."""
    try:
        yield
    except UnsupportedModelError as error:
        if str(what) in str(error):
            raise
        raise UnsupportedModelError(f"{what}: {error}") from error
    except MilepostError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: cannot be read ({_reason(error)})") from error


def read_object(path: Path, kind: ErrorKind = ConfigError) -> dict[str, Any]:
    """Returns the JSON object in a regular file; raises `kind`, naming the file. Numbers that
    transformers writes as `{"__float__": "Infinity"}` are read as numbers."""
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object. A repeated name must have the same value each time."""
    content = dict(pairs)
    if len(content) < len(pairs):
        for name, value in pairs:
            if content[name] != value:
                raise ValueError(f"{name!r} is there twice, as {value!r} and {content[name]!r}")
    return content


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "objects and lists are nested too deeply"
    lines = str(error).strip().splitlines()
    message = lines[0].rstrip(".") if lines else ""
    if isinstance(error, OSError | UnicodeError | json.JSONDecodeError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
