"""Handles what requests ask for in vain: ignored and reported, or refused.

Every client sends fields that only its own server reads. Bodies keep them as extras; here they are
removed, so that none reaches a chat template, and named in the log (once each) and in the
response's header `x-milepost-ignored`. The same applies to tools and items of kinds that no model
here knows, to known fields without an effect, and to values that were not used as they stand.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from milepost.server.errors import HttpError
from milepost.server.fields import Body, Unread

logger = logging.getLogger(__name__)

HEADER = b"x-milepost-ignored"
MAX_UNKNOWN = 256
"""Largest number of them in a body."""
MAX_NAMED = 16
"""Largest number of fields that a response names."""
MAX_KNOWN = 256
"""Largest number of fields that are remembered as logged, since clients choose their names."""

_LEAVES = frozenset((str, int, float, bool, type(None), dict))
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


class UnknownFields:
    """The policy of one server."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._told: set[str] = set()

    def settle(self, body: Body, scope: Any) -> None:
        """Removes unknown fields from a body, and reports everything that it asks for in vain.

        Raises HttpError 400 if unknown fields are refused, or if there are too many.
        """
        found = list(islice(ignored(body), MAX_UNKNOWN + 1))
        if not found:
            return
        refusable = [path for path, is_refusable in found if is_refusable]
        if len(refusable) > MAX_UNKNOWN:
            raise HttpError(400, f"the body has more than {MAX_UNKNOWN} unknown fields")
        if self._strict and refusable:
            raise HttpError(400, f"{refusable[0]}: no such field here", param=refusable[0])
        self.tell(refusable, scope, hint="; --strict refuses such fields")
        self.tell((path for path, is_refusable in found if not is_refusable), scope)

    def tell(self, paths: Iterable[str], scope: Any, *, hint: str = "") -> None:
        """Names ignored fields in the log and in the response."""
        names = dict.fromkeys(_INDEX.sub("[]", path) for path in paths)
        if not names:
            return
        plain = [name for name in names if _PLAIN.fullmatch(name)]
        for name in plain:
            if name not in self._told and len(self._told) < MAX_KNOWN:
                self._told.add(name)
                logger.warning("%s: ignored%s", name, hint)
        record = scope["milepost.record"]
        before = record.get("ignored", [])
        record["ignored"] = [*dict.fromkeys([*before, *plain])][:MAX_NAMED]
        headers = scope["milepost.headers"]
        headers[:] = [header for header in headers if header[0] != HEADER]
        headers.append((HEADER, (", ".join(record["ignored"]) or "?").encode("ascii")))


def ignored(body: Body) -> Iterator[tuple[str, bool]]:
    """Removes the extras of a body and of the bodies inside it. Yields the path of each, and of
    everything else that is ignored, with whether a strict server refuses it."""
    todo: list[_FieldPlace] = [(body, None, "", None)]
    while todo:
        place = todo.pop()
        current = place[0]
        extras = current.__pydantic_extra__
        if extras:
            where = _path(place)
            yield from ((where + name, True) for name in extras)
            extras.clear()
        watch = _watch(type(current))
        if watch is not None:
            yield from watch.ignored(place)
        inside: list[_FieldPlace] = []
        for name, value in current.__dict__.items():
            if type(value) in _LEAVES:  # much faster than isinstance
                continue
            if isinstance(value, Body):
                inside.append((value, place, name, None))
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                inside += [(item, place, name, index) for index, item in enumerate(value)]
        todo += reversed(inside)


@dataclass(frozen=True, slots=True)
class _Watch:
    """The parts of one class of bodies that may be ignored."""

    marks: tuple[tuple[str, Unread], ...]
    """Names of fields without an effect, and what is reported of each."""
    leaves_out: bool
    changes: bool

    def ignored(self, place: _FieldPlace) -> Iterator[tuple[str, bool]]:
        body = place[0]
        for name, mark in self.marks:
            value = body.__dict__[name]
            if value is not None and mark.is_asked(value):
                yield _path(place) + name, False
        for name in body.left_out() if self.leaves_out else ():
            yield _path(place) + name, True
        for name in body.changed() if self.changes else ():
            yield _path(place) + name, False


@cache
def _watch(kind: type[Body]) -> _Watch | None:
    """Returns None for a class in which only unknown fields can be ignored."""
    marks = tuple(
        (name, mark)
        for name, field in kind.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unread)
    )
    leaves_out = kind.left_out is not Body.left_out
    changes = kind.changed is not Body.changed
    return _Watch(marks, leaves_out, changes) if marks or leaves_out or changes else None


_FieldPlace = tuple[Body, Any, str, int | None]
"""A body, the place of the body it stands in, and its field and index there."""


def _path(place: _FieldPlace) -> str:
    """Returns the path of a place, up to the name of one of its fields."""
    steps = []
    while place[1] is not None:
        _, outer, name, index = place
        steps.append(f"{name}." if index is None else f"{name}[{index}].")
        place = outer
    return "".join(reversed(steps))
