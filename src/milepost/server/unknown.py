"""Unknown fields of requests: ignored and reported, or refused.

Every client sends a field that only its own server reads. Bodies keep them as extras; here they
are taken out, so that none reaches a chat template, and named in the log (once each) and in the
response's header `x-milepost-ignored`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from milepost.server.errors import HttpError
from milepost.server.parts import Body

logger = logging.getLogger(__name__)

HEADER = b"x-milepost-ignored"
MAX_UNKNOWN = 256
"""Most that a body may have of them."""
MAX_NAMED = 16
"""Most fields that a response names."""
MAX_KNOWN = 256
"""Most fields that are remembered as told of: names come from clients."""

_LEAVES = frozenset((str, int, float, bool, type(None), dict))
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


class UnknownFields:
    """The policy of one server."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._told: set[str] = set()

    def settle(self, body: Body, scope: Any) -> None:
        """Take out of a body what nobody knows, and tell of it.

        Raises HttpError 400 if unknown fields are refused, or if there are very many.
        """
        found = list(islice(taken(body), MAX_UNKNOWN + 1))
        if not found:
            return
        if len(found) > MAX_UNKNOWN:
            raise HttpError(400, f"the body has more than {MAX_UNKNOWN} fields that nobody knows")
        if self._strict:
            raise HttpError(400, f"{found[0]}: no such field here", param=found[0])
        self.tell(found, scope)

    def tell(self, paths: list[str], scope: Any) -> None:
        """Name fields that were ignored in the log and in the response."""
        names = dict.fromkeys(_INDEX.sub("[]", path) for path in paths)
        plain = [name for name in names if _PLAIN.fullmatch(name)]
        for name in plain:
            if name not in self._told and len(self._told) < MAX_KNOWN:
                self._told.add(name)
                logger.warning("%s: ignored; --strict refuses such fields", name)
        scope["milepost.record"]["ignored"] = plain[:MAX_NAMED]
        header = ", ".join(plain[:MAX_NAMED]) or "?"
        scope["milepost.headers"].append((HEADER, header.encode("ascii")))


def taken(body: Body) -> Iterator[str]:
    """Remove the extras of a body and of those inside it; yields their paths."""
    todo: list[_Place] = [(body, None, "", None)]
    while todo:
        place = todo.pop()
        own = place[0]
        extras = own.__pydantic_extra__
        if extras:
            where = _path(place)
            yield from (where + name for name in extras)
            extras.clear()
        inside: list[_Place] = []
        for name, value in own.__dict__.items():
            if type(value) in _LEAVES:  # to ask pydantic whether it is a body takes much longer
                continue
            if isinstance(value, Body):
                inside.append((value, place, name, None))
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                inside += [(item, place, name, index) for index, item in enumerate(value)]
        todo += reversed(inside)


_Place = tuple[Body, Any, str, int | None]
"""A body, the place of the one that it stands in, and the field and the index there."""


def _path(place: _Place) -> str:
    """Of a place, up to the name of a field of it."""
    steps = []
    while place[1] is not None:
        _, outer, name, index = place
        steps.append(f"{name}." if index is None else f"{name}[{index}].")
        place = outer
    return "".join(reversed(steps))
