"""Who may call a route, and who calls: the audience of each route, and the keys.

A decorator on a route's handler states its audience, and the route itself checks the caller, so the
check applies to what was routed rather than to a spelling of its path. A route without an audience
cannot be made.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from fastapi.routing import APIRoute

from milepost.server.errors import HttpError

F = TypeVar("F", bound=Callable[..., Any])

_STATED = "milepost_audience"
"""Name of the handler's attribute."""


class Audience(IntEnum):
    """Who may call a route. Each member may do what those before it may."""

    ANYONE = 0
    CLIENT = 1
    """Callers with an API key, or anyone if the server has none."""
    OPERATOR = 2
    """Callers with an admin key, or clients if the server has none."""


def _stating(audience: Audience) -> Callable[[F], F]:
    def state(handler: F) -> F:
        setattr(handler, _STATED, audience)
        return handler

    return state


for_anyone = _stating(Audience.ANYONE)
"""Declares a route that needs no key: it reveals nothing about the model or requests."""
for_clients = _stating(Audience.CLIENT)
for_operators = _stating(Audience.OPERATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request."""

    audience: Audience
    owner: str
    """Digest of the caller's key, the same however the key was sent. Stored responses are found by
    their owner only."""


class Keys:
    """Identifies callers by their keys."""

    def __init__(self, clients: Sequence[str], operators: Sequence[str]) -> None:
        self._clients = [key.strip().encode() for key in clients]
        self._operators = [key.strip().encode() for key in operators]
        self._unknown = Audience.OPERATOR
        """The audience of callers without a valid key."""
        if self._operators:
            self._unknown = Audience.CLIENT
        if self._clients:
            self._unknown = Audience.ANYONE

    @property
    def are_required(self) -> bool:
        """Whether clients need a key."""
        return self._unknown is Audience.ANYONE

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Returns the caller whose key is in `Authorization: Bearer` or in `X-Api-Key`."""
        bearer, other = _bearer(headers)
        given = [key for key in (bearer, header(headers, b"x-api-key").strip()) if key]
        operator = _first_match(given, self._operators)
        client = _first_match(given, self._clients)
        if operator is not None:
            return Caller(audience=Audience.OPERATOR, owner=_digest(operator))
        if client is not None:
            most = Audience.CLIENT if self._operators else Audience.OPERATOR
            return Caller(audience=most, owner=_digest(client))
        return Caller(audience=self._unknown, owner=_digest((given or [other])[0]))


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Returns the bearer token, and what the header says if there is none."""
    words = header(headers, b"authorization").split(None, 1)
    if words and words[0].lower() == b"bearer":
        return b"".join(words[1:]).strip(), b""
    return b"", b" ".join(words).strip()


def header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Returns a header's value, or nothing if it is missing."""
    return next((value for key, value in headers if key == name), b"")


def _first_match(given: Sequence[bytes], keys: Sequence[bytes]) -> bytes | None:
    """Returns the first valid key. All are compared, each in constant time."""
    pairs = [(one, hmac.compare_digest(one, key)) for one in given for key in keys]
    return next((one for one, is_equal in pairs if is_equal), None)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def admit(scope: Any, audience: Audience) -> None:
    """Raises HttpError 401 unless the caller belongs to the audience."""
    caller: Caller = scope["milepost.caller"]
    if caller.audience < audience:
        raise HttpError(
            401, "send a valid key as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
        )


class GuardedRoute(APIRoute):
    """A route that checks its caller before anything of the request is read, and before it reveals
    which methods exist."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        audience = getattr(endpoint, _STATED, None)
        assert audience is not None, f"{path} states who may call it (server/callers.py)"
        self.audience: Audience = audience
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        admit(scope, self.audience)
        await super().handle(scope, receive, send)
