"""Arguments of calls in the history.

Models write calls that are cut off, have raw line breaks in their strings, or are encoded twice;
clients store such calls and send them back with every later turn. So whatever stands there is read
as an object, as far as it goes.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def read(given: Any) -> tuple[dict[str, Any], bool]:
    """The arguments as an object, and whether something else was given.

    An empty text means no arguments. What cannot be read is left out.
    """
    if isinstance(given, dict):
        return given, False
    if not isinstance(given, str):
        return {}, True
    if not given:
        return {}, False
    try:
        found = from_json(given)
    except ValueError:
        found = _as_far_as_it_goes(given)
        return (found if isinstance(found, dict) else {}), True
    if isinstance(found, dict):
        return found, False
    return (read(found)[0] if isinstance(found, str) and found else {}), True


def _as_far_as_it_goes(text: str) -> Any:
    escaped = _STRING.sub(lambda match: _CONTROL.sub(_escape, match.group()), text)
    try:
        return from_json(escaped, allow_partial="trailing-strings")
    except ValueError:
        return None


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"
