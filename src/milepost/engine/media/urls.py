"""Reads images from URLs: data: always, file: below one directory, http(s) from listed hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from milepost.config import EngineConfig
from milepost.engine.media.given import Given
from milepost.errors import InvalidPromptError

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
    from milepost.engine.media.fetching import fetch

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
