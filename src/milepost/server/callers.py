"""Who may call a route, and who calls: the audience that each route states, and the keys.

A route says who may call it with a decorator on its handler, and checks that itself, so the check
is made on what was routed and not on a spelling of its path. A route that says nothing cannot be
made.
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
"""The attribute of a handler."""


class Audience(IntEnum):
    """Who may call a route. Each member may do what those before it may."""

    ANYONE = 0
    CLIENT = 1
    """Callers with an API key; anyone where the server has none."""
    OPERATOR = 2
    """Callers with an admin key; clients where the server has none."""


def for_anyone(handler: F) -> F:
    """State that a route needs no key: it says nothing about the model or about requests."""
    return _stated(handler, Audience.ANYONE)


def for_clients(handler: F) -> F:
    """State that a route is for clients."""
    return _stated(handler, Audience.CLIENT)


def for_operators(handler: F) -> F:
    """State that a route is for operators."""
    return _stated(handler, Audience.OPERATOR)


def _stated(handler: F, audience: Audience) -> F:
    setattr(handler, _STATED, audience)
    return handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request."""

    audience: Audience
    owner: str
    """Digest of the caller's key, the same however the key was sent: what a caller stores is found
    by the same owner only."""


class Keys:
    """Tells callers by their keys."""

    def __init__(self, clients: Sequence[str], operators: Sequence[str]) -> None:
        self._clients = [key.strip().encode() for key in clients]
        self._operators = [key.strip().encode() for key in operators]
        self._unknown = Audience.OPERATOR
        """The audience of callers without a valid key."""
        if self._operators:
            self._unknown = Audience.CLIENT
        if self._clients:
            self._unknown = Audience.ANYONE

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """The caller whose key is in `Authorization: Bearer` or in `X-Api-Key`."""
        bearer, other = _bearer(headers)
        given = [key for key in (bearer, _header(headers, b"x-api-key").strip()) if key]
        operator = _first_match(given, self._operators)
        client = _first_match(given, self._clients)
        if operator is not None:
            return Caller(audience=Audience.OPERATOR, owner=_digest(operator))
        if client is not None:
            most = Audience.CLIENT if self._operators else Audience.OPERATOR
            return Caller(audience=most, owner=_digest(client))
        return Caller(audience=self._unknown, owner=_digest((given or [other])[0]))


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The bearer token, and else what the header says in place of one."""
    words = _header(headers, b"authorization").split(None, 1)
    if words and words[0].lower() == b"bearer":
        return b"".join(words[1:]).strip(), b""
    return b"", b" ".join(words).strip()


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _first_match(given: Sequence[bytes], keys: Sequence[bytes]) -> bytes | None:
    """The first of the given keys that is valid. All are compared, each in constant time."""
    pairs = [(one, hmac.compare_digest(one, key)) for one in given for key in keys]
    return next((one for one, is_equal in pairs if is_equal), None)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def admit(scope: Any, audience: Audience) -> None:
    """Raise HttpError 401 unless the caller belongs to the audience."""
    caller: Caller = scope["milepost.caller"]
    if caller.audience < audience:
        raise HttpError(
            401, "send a valid key as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
        )


class GuardedRoute(APIRoute):
    """A route that serves its audience alone. Before anything of a request is read, and before it
    is told which methods there are, its caller is judged."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        audience = getattr(endpoint, _STATED, None)
        assert audience is not None, f"{path} states who may call it (server/callers.py)"
        self.audience: Audience = audience
        super().__init__(path, endpoint, **options)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        admit(scope, self.audience)
        await super().handle(scope, receive, send)
