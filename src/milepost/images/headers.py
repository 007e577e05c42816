"""Recognises a picture's format by its first bytes. Only formats on the list are ever opened."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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


def shown_share(data: bytes) -> float:
    """Returns the share of its duration for which an MP4 file shows its video: less than one if
    a video was trimmed without coding it again, which leaves all frames in the file and an edit
    list beside them (ISO/IEC 14496-12, section 8.6.6)."""
    for movie in _boxes(data, b"moov"):
        scale, _ = _duration(next(_boxes(movie, b"mvhd"), b""))
        for track in _boxes(movie, b"trak"):
            media = next(_boxes(track, b"mdia"), b"")
            handler = next(_boxes(media, b"hdlr"), b"")
            edits = next(_boxes(next(_boxes(track, b"edts"), b""), b"elst"), b"")
            media_scale, duration = _duration(next(_boxes(media, b"mdhd"), b""))
            if handler[8:12] == b"vide" and edits and scale and media_scale and duration:
                return min(1.0, _num_shown(edits) * media_scale / (scale * duration))
    return 1.0


def _boxes(data: bytes, kind: bytes) -> Iterator[bytes]:
    """Yields the bodies of the boxes of a `kind`, up to the first box that is not whole (section
    4.2)."""
    start = 0
    while start + 8 <= len(data):
        size, header = int.from_bytes(data[start : start + 4], "big"), 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        if not header <= size <= len(data) - start:
            return
        if data[start + 4 : start + 8] == kind:
            yield data[start + header : start + size]
        start += size


def _duration(header: bytes) -> tuple[int, int]:
    """Returns units a second and the duration in units of `mvhd` or `mdhd` (sections 8.2.2 and
    8.4.2)."""
    first, width = (20, 8) if header[:1] == b"\1" else (12, 4)
    return (
        int.from_bytes(header[first : first + 4], "big"),
        int.from_bytes(header[first + 4 : first + 4 + width], "big"),
    )


def _num_shown(edits: bytes) -> int:
    """Returns for how many of the movie's units the edits of `elst` show the media."""
    row = struct.Struct(">Qq4x" if edits[:1] == b"\1" else ">Ii4x")
    rows = edits[8 : 8 + (len(edits) - 8) // row.size * row.size]
    return sum(length for length, first in row.iter_unpack(rows) if first >= 0)


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
