"""Reads files that users name, bounded: settings, cost models, traces."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 2**18
MAX_LINE = 2**26
"""Longest line, in characters: a file may be one endless line, above all if it is compressed."""


def read_small(path: Path) -> str:
    """Returns a file's text; it may be a pipe. Raises OSError, or ValueError if it is too long or
    no UTF-8."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content.decode()


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file, plain or gzip. Raises OSError or EOFError, or ValueError for a
    line that is too long or no UTF-8."""
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    opened = gzip.open if is_gzip else open
    with opened(path, "rt", encoding="utf-8") as lines:
        while line := lines.readline(MAX_LINE):
            if len(line) == MAX_LINE:
                raise ValueError(f"a line of {MAX_LINE} characters or more")
            yield line
