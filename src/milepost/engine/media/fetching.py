"""Fetches images over http(s): from listed hosts, at public addresses, within bytes and seconds.

A host's name is resolved once for each hop, and the connection goes to one of the addresses that
were checked. Redirects are followed by hand, and each target is checked like the first URL. No
proxy of the environment is used, and no cookies are kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

from milepost.engine.media.urls import MediaRules, shown
from milepost.errors import InvalidPromptError, missing

MAX_REDIRECTS = 5
_PIECE_BYTES = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "milepost"}


def is_public(address: str) -> bool:
    """Whether an address is on the public internet. Loopback, private, link-local and multicast
    addresses are not, nor are IPv6 addresses that stand for such an IPv4 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner and not is_public(str(inner)):
            return False
    return found.is_global and not found.is_multicast


_ADDRESS = re.compile(r"[0-9.]+|.*:.*")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def fetch(
    url: str, rules: MediaRules, *, may_reach: Callable[[str], bool] = is_public
) -> bytes:
    """Returns the bytes at a URL. `may_reach` decides which addresses are allowed. Raises
    InvalidPromptError, without the contents of the host's answer."""
    try:
        import aiohttp
    except ImportError:
        raise missing("an image at an http(s) URL", "aiohttp", "server") from None
    try:
        async with asyncio.timeout(rules.timeout_s):
            return await _follow(aiohttp, url, rules, may_reach)
    except TimeoutError:
        raise InvalidPromptError(
            f"image URL {shown(url)}: it took more than {rules.timeout_s:g} seconds"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError, asyncio.IncompleteReadError) as error:
        if isinstance(error, InvalidPromptError):
            raise
        raise InvalidPromptError(f"image URL {shown(url)}: it could not be fetched") from None


async def _follow(
    aiohttp: Any, url: str, rules: MediaRules, may_reach: Callable[[str], bool]
) -> bytes:
    connector = aiohttp.TCPConnector(
        resolver=_Resolver(url, may_reach), use_dns_cache=False, force_close=True, limit=1
    )
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=_HEADERS, trust_env=False
    ) as session:
        here = url
        for _ in range(MAX_REDIRECTS + 1):
            _check(here, url, rules, may_reach)
            async with session.get(here, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    here = urljoin(here, answer.headers["Location"])
                    continue
                if answer.status != 200:
                    raise InvalidPromptError(
                        f"image URL {shown(url)}: its host answered with status {answer.status}"
                    )
                return await _read(answer, rules)
    raise InvalidPromptError(f"image URL {shown(url)}: more than {MAX_REDIRECTS} redirects")


def _check(here: str, url: str, rules: MediaRules, may_reach: Callable[[str], bool]) -> None:
    """Raises InvalidPromptError for a hop that is not allowed."""
    parts = urlsplit(here)
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme not in ("http", "https"):
        raise InvalidPromptError(f"image URL {shown(url)}: it leads to no http(s) URL")
    if parts.username is not None or parts.password is not None:
        raise InvalidPromptError(f"image URL {shown(url)}: leave user and password out")
    if host not in rules.domains:
        instead = "is not among" if rules.domains else "cannot be fetched without"
        raise InvalidPromptError(
            f"image URL {shown(url)}: the host {host[:80]!r} {instead} --allowed-media-domains"
        )
    # An address is not resolved, and so not checked there.
    if _ADDRESS.fullmatch(host) and not may_reach(host):
        raise InvalidPromptError(f"image URL {shown(url)}: its address is not public")


async def _read(answer: Any, rules: MediaRules) -> bytes:
    rules.check_size(answer.content_length or 0)
    data = bytearray()
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        data += piece
        rules.check_size(len(data))
    return bytes(data)


class _Resolver:
    """Resolves a name once and returns the addresses that may be reached; aiohttp connects to
    those."""

    def __init__(self, url: str, may_reach: Callable[[str], bool]) -> None:
        self._url = url
        self._may_reach = may_reach

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[Any]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        addresses = [(each[0], str(each[4][0])) for each in found]
        if not addresses or not all(self._may_reach(address) for _, address in addresses):
            raise InvalidPromptError(f"image URL {shown(self._url)}: its address is not public")
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": kind,
                "proto": socket.IPPROTO_TCP,
                "flags": socket.AI_NUMERICHOST,
            }
            for kind, address in addresses
        ]

    async def close(self) -> None:
        """Does nothing: no connection is kept open."""
