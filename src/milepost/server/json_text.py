r"""Parses JSON from clients, and reads a text that was cut inside an emoji.

JavaScript writes half of a surrogate pair as an escape (`\ud83d`). JSON's grammar allows it, but no
Unicode text has it. Agents that shorten what a tool returned send one, and then again with every
later turn: refused once, their conversation would be over.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic_core import from_json

MAX_MENDED_BYTES: Final = 2**22
MAX_HALVES: Final = 4096
"""Limits on a text that is searched and on what is replaced in it, since nothing else runs
meanwhile: 0.1 s at most."""

_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF: Final = re.compile(
    rb"\\(?<!\\\\)((?:\\\\)*+)u"  # an odd number of backslashes
    rb"(?:" + _HIGH + rb"(?!\\u" + _LOW + rb")|(?<!\\u" + _HIGH + rb"\\u)" + _LOW + rb")"
)


def read_json(text: bytes, *, allows_nan: bool = False) -> Any:
    """Returns the value of a JSON text, with U+FFFD for each half of a surrogate pair. Raises
    ValueError."""
    try:
        return from_json(text, allow_inf_nan=allows_nan)
    except ValueError:
        if len(text) > MAX_MENDED_BYTES:
            raise
        mended = _HALF.sub(rb"\\\1ufffd", text, count=MAX_HALVES)
        if mended == text:
            raise
        return from_json(mended, allow_inf_nan=allows_nan)
