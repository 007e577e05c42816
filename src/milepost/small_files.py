"""Reads small files that users name: settings and cost models."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 2**18


def read_small(path: Path) -> str:
    """Returns a file's text; it may be a pipe. Raises OSError, or ValueError if it is too long or
    no UTF-8."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content.decode()
