"""Who may call a route, and who calls: the audience of each route, the keys, and without keys the
sites whose pages may ask.

A decorator on a route's handler states its audience, and the route itself checks the caller, so the
check applies to what was routed rather than to a spelling of its path. A route without an audience
cannot be made.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from fastapi.routing import APIRoute

from milepost.server.config import ServerConfig
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


_READING = ("GET", "HEAD", "OPTIONS")
_LOCAL = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that no public DNS server answers for. Nor does one for a name without a dot."""
_PORT = re.compile(r":\d*$")


def check_site(scope: Any, config: ServerConfig) -> None:
    """Raises HttpError 403 if a page of another site seems to send this request through a visitor's
    browser, to a server without keys.

    A browser sends any page's plain POST to any address, and lets a page read answers from a host
    with the page's own name, even if that name now points to this machine. Keys stop both, since no
    browser adds them by itself; a server without them looks at what browsers say about the page.
    """
    headers = scope["headers"]
    origin = header(headers, b"origin").decode("latin-1")
    is_foreign = header(headers, b"sec-fetch-site") == b"cross-site"
    allowed = config.allowed_origins or ()
    if is_foreign and scope["method"] not in _READING and not {"*", origin} & {*allowed}:
        raise HttpError(
            403, f"a page of {origin[:100]!r} asks: allow it with --allowed-origins, or set a key"
        )
    host = header(headers, b"host").decode("latin-1")
    hosts = config.allowed_hosts or ()
    is_own = is_loopback(config) and not _is_from_outside(scope)
    if is_own and not _is_local(host) and not {"*", _name(host)} & {*hosts}:
        raise HttpError(
            403, f"host {host[:100]!r}: allow this name with --allowed-hosts, or set a key"
        )


def is_loopback(config: ServerConfig) -> bool:
    """Returns whether the server listens for this machine alone. One that listens for others has
    names that it does not know, such as those of proxies beside it."""
    if config.uds is not None:
        return False
    return config.host in ("localhost", "::1") or config.host.startswith("127.")


def _is_from_outside(scope: Any) -> bool:
    """Returns whether a request reached an address that other machines reach: a program in which
    this server is embedded may listen there, whatever the configuration says."""
    address = ((scope.get("server") or ("",))[0] or "").strip("[]")
    return _is_address(address) and not ipaddress.ip_address(address).is_loopback


def _is_local(host: str) -> bool:
    name = _name(host)
    return "." not in name or name.endswith(_LOCAL) or _is_address(name)


def _name(host: str) -> str:
    return _PORT.sub("", host).rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
