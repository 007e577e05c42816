"""Keeps pages of other sites from using a server without keys through their visitors' browsers.

A browser sends any page's plain POST to any address, and lets a page read answers from a host with
the page's own name, even if that name now points to this machine. Keys stop both, since no browser
adds them by itself; a server without them looks at what browsers say about the page.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from milepost.server.callers import header
from milepost.server.config import ServerConfig
from milepost.server.errors import HttpError

_READING = ("GET", "HEAD", "OPTIONS")
_LOCAL = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that no public DNS server answers for. Nor does one for a name without a dot."""
_PORT = re.compile(r":\d*$")


def check_site(scope: Any, config: ServerConfig) -> None:
    """Raises HttpError 403 if a page of another site seems to send this request."""
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
    if _is_loopback(config) and not _is_local(host) and not {"*", _name(host)} & {*hosts}:
        raise HttpError(
            403, f"host {host[:100]!r}: allow this name with --allowed-hosts, or set a key"
        )


def _is_loopback(config: ServerConfig) -> bool:
    """Returns whether the server listens for this machine alone. One that listens for others has
    names that it does not know, such as those of proxies beside it."""
    if config.uds is not None:
        return False
    return config.host in ("localhost", "::1") or config.host.startswith("127.")


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
