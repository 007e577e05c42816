"""Finds a checkpoint's files (a folder, a snapshot from the hub, or the embedded model), and reads
the small JSON files among them, which are untrusted input.

`reading` is the one place that converts errors from reading a checkpoint to Milepost's own. Sizes
are bounded before files are parsed. The module imports nothing heavy, because a server's HTTP
process uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milepost.checks import decode_floats
from milepost.errors import ConfigError, MilepostError, UnsupportedModelError, WeightsError

EMBEDDED_MODEL = Path(__file__).parent.parent / "tiny"

_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer*", "*.model"]
_GGUF = "; GGUF is not read: name the model's safetensors checkpoint"
_WEIGHT_FILES = ["*.safetensors"]


def find_folder(
    model: str | Path,
    *,
    revision: str | None,
    with_weights: bool,
    download_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """Returns the folder itself, or its snapshot from the hub, in `download_dir` or the hub's own
    cache. Raises ConfigError if there is neither."""
    folder = Path(model)
    if folder.is_dir():
        return _checked(folder, model)
    if folder.is_absolute() or folder.exists() or str(model).startswith((".", "~")):
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        advice = _GGUF if folder.suffix == ".gguf" else ""
        raise ConfigError(f"model={str(model)!r}: {what}{advice}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    patterns = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        snapshot = Path(
            snapshot_download(
                str(model),
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                token=token,
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model={str(model)!r} is neither a folder nor a checkpoint from the hub ({why})"
        ) from error
    return _checked(snapshot, model)


def _checked(folder: Path, model: str | Path) -> Path:
    """Returns the folder if it has a configuration; raises ConfigError otherwise."""
    if (folder / "config.json").exists():
        return folder
    advice = ": name one with a checkpoint in Hugging Face's format"
    if "gguf" in str(model).lower() or any(folder.glob("*.gguf")):
        advice = _GGUF
    raise ConfigError(f"model={str(model)!r}: there is no config.json{advice}")


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
