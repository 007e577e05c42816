"""Recognises a picture's format by its first bytes. Only formats on the list are ever opened."""

from __future__ import annotations

from milepost.errors import InvalidPromptError

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
)
_OTHERS = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"SIMPLE  =", "FITS"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG or another XML"),
    (b"<!DOCTYPE html", "HTML"),
)
_CONTAINERS = {b"avif": "AVIF", b"heic": "HEIC", b"mif1": "HEIF", b"isom": "MP4", b"mp42": "MP4"}
"""Brands of files whose fifth to eighth bytes are `ftyp`."""
_PICTURES = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"crx ")
"""Brands of such files with pictures: https://mp4ra.org/registered-types/brands."""
_MOST_BRANDS = 1024
"""Largest size of the box that names the brands, in bytes."""
_EBML = b"\x1a\x45\xdf\xa3"
"""Beginning of a Matroska file (RFC 8794, section 11.2.1)."""


def format_of(data: bytes) -> str:
    """Returns PNG, JPEG, WEBP or GIF. Raises InvalidPromptError, naming the format that it has, for
    any other."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise InvalidPromptError(
        f"the image {_described(data)}: supported are PNG, JPEG, WebP and GIF; convert it"
    )


def container_of(data: bytes) -> str | None:
    """Returns MP4 or WebM for the files of videos, QuickTime's and Matroska's included; None for
    others."""
    if data.startswith(_EBML):
        return "WebM"
    size, brand = int.from_bytes(data[:4], "big"), data[8:12]
    is_whole = data[4:8] == b"ftyp" and 16 <= size <= min(len(data), _MOST_BRANDS)
    return "MP4" if is_whole and brand not in _PICTURES else None


def webp_size(data: bytes) -> tuple[int, int]:
    """Returns the width and height that the header of a WebP file names (RFC 9649, sections 2.5 to
    2.7), or zeros if there is none: its decoder allocates all pixels as it opens a file."""
    kind, body = data[12:16], data[20:]
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + _number(body[4:7]), 1 + _number(body[7:10])
    if kind == b"VP8L" and len(body) >= 5:
        bits = _number(body[1:5])
        return 1 + bits % 2**14, 1 + (bits >> 14) % 2**14
    if kind == b"VP8 " and len(body) >= 10:
        return _number(body[6:8]) % 2**14, _number(body[8:10]) % 2**14
    return 0, 0


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _described(data: bytes) -> str:
    if not data:
        return "has no bytes"
    for magic, name in _OTHERS:
        if data.startswith(magic):
            return f"is a {name} file"
    if data[4:8] == b"ftyp":
        name = _CONTAINERS.get(data[8:12], "MP4 or another media container")
        return f"is a {name} file"
    return f"begins with the bytes {data[:8].hex()}, which are of no known format"
