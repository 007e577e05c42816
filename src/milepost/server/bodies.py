"""Reads the bodies of requests. Limits them before anything is built, and uses a parser that
reports where they are wrong and that deep nesting cannot break.

The memory that a body takes depends on the number of its values rather than on its bytes: an empty
list takes three bytes of text and seventy of memory. So the values are first counted in the text,
in a pass of milliseconds that stores nothing, and a body with more values than any request needs is
refused. Other bodies take, with the objects made from them, at most ten times their size and a few
megabytes. Large bodies are read in a thread (`LargeWork`).

A text that was cut inside an emoji is mended. JavaScript then writes half of a surrogate pair as an
escape (`\\ud83d`), which JSON's grammar allows, but no Unicode text has. Agents that shorten what a
tool returned send one, and then again with every later turn: refused once, their conversation would
be over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from email.message import Message
from typing import Any, Final, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from milepost.engine.text import MAX_SHORT, Lane
from milepost.server.callers import GuardedRoute
from milepost.server.errors import ClientGoneError, HttpError

MAX_VALUES: Final = 2**21
"""Elements of all lists and objects in a body; nearly all are token ids."""
MAX_KEYS: Final = 2**17
MAX_CONTAINERS: Final = 2**15
"""Lists and objects in a body."""

STOP_AT_FIRST: Final = Field(fail_fast=True)
"""Stops validating a list at its first wrong element, rather than reporting up to a million of
them."""

_CHUNK_BYTES = 2**20
_KINDS: Final = (
    (b",", MAX_VALUES, "values"),
    (b":", MAX_KEYS, "keys"),
    (b"[{", MAX_CONTAINERS, "lists and objects"),
)
"""The characters that are counted for each limit."""


class JsonRoute(GuardedRoute):
    """A route with an audience, whose bodies are JSON."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if self.body_field is not None:  # clients name types for empty bodies
                _check_content_type(request.headers.get("content-type"))
                _check_coding(request.headers.get("content-encoding", ""))
            try:
                return await handle(_JsonRequest(request.scope, request.receive, self.body_field))
            except HTTPException as error:
                if isinstance(error.__cause__, RequestValidationError):  # found by `json`
                    raise error.__cause__ from None
                raise

        return handle_json


class _JsonRequest(Request):
    """A request whose `json` is the body as its endpoint takes it, already validated."""

    def __init__(self, scope: Any, receive: Any, field: Any) -> None:
        super().__init__(scope, receive)
        self._field = field

    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect as error:
            self.scope["milepost.record"]["client_gone"] = True
            raise ClientGoneError from error

    async def json(self) -> Any:
        body = await self.body()
        self.scope[BODY_SIZE] = len(body)
        return await self.app.state.large.run(lambda: self._validated(body), len(body))

    def _validated(self, body: bytes) -> Any:
        try:
            body = as_utf8(body)
            check_size(body)
            value = read_json(body)
        except ValueError as error:
            raise HttpError(400, f"the body is not valid JSON: {error}") from error
        found, problems = self._field.validate(value, {}, loc=("body",))
        if problems:
            raise RequestValidationError(problems, body=value)
        return found


def _check_content_type(value: str | None) -> None:
    """Raises HttpError 415 for another type than JSON; no type at all is allowed."""
    if not value:
        return
    message = Message()
    message["content-type"] = value
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or subtype.split("+")[-1] != "json":
        raise HttpError(415, f"content-type {value[:100]!r}: send JSON as 'application/json'")


def _check_coding(value: str) -> None:
    """Raises HttpError 415 for a compressed body."""
    if value.strip().lower() not in ("", "identity"):
        raise HttpError(415, f"content-encoding {value[:100]!r}: send the body uncompressed")


def as_utf8(body: bytes) -> bytes:
    """Returns a body in UTF-8 without a byte order mark. Shells on Windows write files with one,
    and in UTF-16. Raises ValueError."""
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding).encode()


def check_size(body: bytes) -> None:
    """Raises HttpError 400 for a body with too many values, even if it is not valid JSON."""
    if all(_count(body, signs) <= limit for signs, limit, _ in _KINDS):
        return  # even if strings are counted
    counts = _counts_outside_strings(body)
    for (_, limit, name), count in zip(_KINDS, counts, strict=True):
        if count > limit:
            raise HttpError(400, f"the body has {count} {name}: use {limit} or fewer")


def _count(body: bytes, signs: bytes) -> int:
    return sum(body.count(bytes([sign])) for sign in signs)


def _counts_outside_strings(body: bytes) -> list[int]:
    """Counts the characters of each kind outside of strings."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote is a delimiter
    counts, is_inside = [0] * len(_KINDS), np.uint8(0)
    for start in range(0, len(plain), _CHUNK_BYTES):
        chunk = np.frombuffer(plain, np.uint8, min(_CHUNK_BYTES, len(plain) - start), start)
        inside = np.bitwise_xor.accumulate((chunk == ord('"')).view(np.uint8)) ^ is_inside
        is_inside = inside[-1]
        outside = chunk[inside == 0]
        for kind, (signs, _, _) in enumerate(_KINDS):
            counts[kind] += sum(int(np.count_nonzero(outside == sign)) for sign in signs)
    return counts


T = TypeVar("T")

_PART_SIZE = 256
"""Size of a message or a part besides its text, in characters that take as long to read."""


class LargeWork:
    """Runs work on large requests in a thread of the server, so that the event loop can answer
    others meanwhile. `close` it at the end.

    Such work is made of calls that hold the interpreter lock, tens of milliseconds each. One thread
    does all of it: several would have the loop wait for several of these calls in a row.
    """

    def __init__(self) -> None:
        self._lane = Lane("large-requests")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Returns the result of `work`: at once if its size in characters is small, otherwise in
        the thread, after work that is smaller and came earlier."""
        return work() if size <= MAX_SHORT else await self._lane.run(work, size)

    def close(self) -> None:
        """Starts no further work."""
        self._lane.close()


def size_of(messages: Sequence[Any] | None) -> int:
    """Returns the size of work on each message, part and call of a conversation, whatever their
    text."""
    count = 0
    for message in messages or ():
        content, calls = getattr(message, "content", None), getattr(message, "tool_calls", None)
        count += 1 + (len(content) if isinstance(content, list) else 0) + len(calls or ())
    return _PART_SIZE * count


BODY_SIZE: Final = "milepost.body_size"
"""Key of a request's scope: the length of its body."""


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
