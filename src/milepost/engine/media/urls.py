"""Reads images from URLs: data: always, file: below one directory, http(s) from listed hosts, at
public addresses, within bytes and seconds.

A host's name is resolved once for each hop, and the connection goes to one of the addresses that
were checked. Redirects are followed by hand, and each target is checked like the first URL. No
proxy of the environment is used, and no cookies are kept.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from milepost.config import EngineConfig
from milepost.engine.media.given import Given
from milepost.errors import InvalidPromptError, missing

MAX_BYTES = 64 * 2**20
"""Largest file of an image."""
_PIECE_CHARS = 2**20
_SHOWN = 80
"""Number of characters of a URL that errors repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRules:
    """The places that images may come from."""

    domains: Collection[str] = ()
    folder: str | None = None
    max_bytes: int = MAX_BYTES
    timeout_s: float = 10.0
    """Longest time to fetch one image, redirects included."""

    @staticmethod
    def of(config: EngineConfig) -> MediaRules:
        """Returns the rules of a configuration."""
        return MediaRules(
            domains=frozenset(each.lower() for each in config.allowed_media_domains or ()),
            folder=config.allowed_local_media_path,
        )

    def check_size(self, num_bytes: int) -> None:
        """Raises InvalidPromptError for a file that is too large."""
        if num_bytes > self.max_bytes:
            raise InvalidPromptError(
                f"an image of {num_bytes} bytes: use {self.max_bytes} bytes or fewer"
            )


def pieces_of(data_url: str) -> Iterator[bytes]:
    """Yields the text of a data: URL, a part at a time."""
    for start in range(0, len(data_url), _PIECE_CHARS):
        yield data_url[start : start + _PIECE_CHARS].encode()


def decoded(data_url: str) -> bytes:
    """Returns the file in a data: URL that was checked. Raises InvalidPromptError."""
    body = data_url[data_url.index(",") + 1 :]
    try:
        return base64.b64decode(unquote(body) if "%" in body else body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise _broken(data_url) from error


async def load(given: Given, rules: MediaRules) -> Any:
    """Returns the bytes of an image, or the image itself if it is no URL. A data: URL is checked
    and returned as it is: to decode megabytes keeps the interpreter lock for tens of milliseconds,
    so that is left to the process that prepares the image. Raises InvalidPromptError."""
    if not isinstance(given.source, str):
        return load_here(given, rules)
    if _split(given.source).scheme == "data":
        return _checked(given.source, rules)
    if not is_remote(given):
        return await asyncio.to_thread(load_here, given, rules)
    return await fetch(given.source, rules)


def load_here(given: Given, rules: MediaRules) -> Any:
    """Returns the bytes of an image that needs no network, or the image itself. Raises
    InvalidPromptError.
    """
    source = given.source
    if isinstance(source, bytes):
        rules.check_size(len(source))
        return source
    if not isinstance(source, str):
        return source
    url = _split(source)
    if url.scheme == "data":
        return decoded(_checked(source, rules))
    if url.scheme == "file":
        return _read_file(url, rules)
    raise InvalidPromptError(
        f"image URL {shown(source)}: use a data: URL, or http(s) or file: where they are allowed"
    )


def is_remote(given: Given) -> bool:
    """Whether an image has to be fetched."""
    return isinstance(given.source, str) and _split(given.source).scheme in ("http", "https")


def shown(url: str) -> str:
    """Returns a URL for an error message."""
    return repr(url if len(url) <= _SHOWN else f"{url[:_SHOWN]}...")


def _split(url: str) -> SplitResult:
    head = url[:4096] if url[:5].lower() == "data:" else url
    try:
        return urlsplit(head)
    except ValueError as error:
        raise InvalidPromptError(f"image URL {shown(url)}: it is malformed") from error


def _checked(url: str, rules: MediaRules) -> str:
    """Returns a data: URL. Raises InvalidPromptError for one of no image, or of too many bytes."""
    comma = url.find(",")
    kind = url[5 : max(comma, 5)].lower().split(";")
    if comma < 0 or kind[-1] != "base64":
        raise InvalidPromptError(f"image URL {shown(url)}: use data:image/png;base64,...")
    if kind[0] and not kind[0].startswith(("image/", "video/")):
        raise InvalidPromptError(f"image URL {shown(url)}: {kind[0][:80]!r} is no image")
    rules.check_size((len(url) - comma - 1) * 3 // 4 - 2)
    if not url.isascii():
        raise _broken(url)
    return url


def _broken(url: str) -> InvalidPromptError:
    return InvalidPromptError(f"image URL {shown(url)}: the base64 is broken")


def _read_file(url: SplitResult, rules: MediaRules) -> bytes:
    name = shown(url.geturl())
    if rules.folder is None:
        raise InvalidPromptError(
            f"image URL {name}: no files are read: --allowed-local-media-path names a directory"
        )
    if url.netloc not in ("", "localhost"):
        raise InvalidPromptError(f"image URL {name}: use file:///path")
    try:
        root = Path(rules.folder).resolve(strict=True)
        path = Path(unquote(url.path)).resolve(strict=True)
        if not path.is_relative_to(root) or not path.is_file():
            raise FileNotFoundError
        rules.check_size(path.stat().st_size)
        with path.open("rb") as file:
            return file.read(rules.max_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        # What is there outside the directory is nobody's business.
        if isinstance(error, InvalidPromptError):
            raise
        raise InvalidPromptError(
            f"image URL {name}: there is no such file below allowed_local_media_path"
        ) from None


# --- over http(s) ------------------------------------------------------------------------------

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
