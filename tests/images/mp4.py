"""Writes MP4 files (ISO/IEC 14496-12) around coded videos, as phones do, and with lies in them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.images.pcm_video import Stream, box

TURNS = {
    0: (1, 0, 0, 1),
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
}
"""Degrees clockwise -> the matrix's a, b, c and d, as a phone writes them."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """What a file says of a video's times and shape. Times are in units of `timescale`."""

    timescale: int = 1000
    durations: Sequence[int] = (500,)
    """Of each frame; the last one is that of all others."""
    turn: int = 0
    """Degrees clockwise by which a player turns each frame."""
    edits: Sequence[tuple[int, int]] = ()
    """Duration in milliseconds and first time of each part that is shown; -1 shows nothing."""
    handler: bytes = b"vide"
    tables: Mapping[bytes, bytes] = field(default_factory=dict)
    """Boxes of `stbl` to write in place of the true ones, without their headers."""
    header_size: tuple[int, int] | None = None
    """Height and width in `tkhd`, if they are others than the stream's."""


def mp4(stream: Stream, track: Track | None = None, brand: bytes = b"isom") -> bytes:
    """Returns the file: `ftyp`, `mdat` with all samples as one chunk, `moov`."""
    track = track or Track()
    head = box(b"ftyp", brand, struct.pack(">I", 512), b"isomiso2mp41")
    samples = stream.samples
    count = len(samples)
    durations = list(track.durations[:count])
    durations += durations[-1:] * (count - len(durations))
    total = sum(durations)
    milliseconds = total * 1000 // track.timescale if track.timescale else total
    tables = {
        b"stsd": _full(struct.pack(">I", 1) + stream.entry),
        b"stts": _full(_table([struct.pack(">II", 1, each) for each in durations])),
        b"stss": _full(_table([struct.pack(">I", 1 + each) for each in range(count)])),
        b"stsc": _full(_table([struct.pack(">III", 1, count, 1)])),
        b"stsz": _full(struct.pack(f">II{count}I", 0, count, *map(len, samples))),
        b"stco": _full(struct.pack(">II", 1, len(head) + 8)),
    }
    tables = {kind: track.tables.get(kind, body) for kind, body in tables.items()}
    height, width = track.header_size or (stream.height, stream.width)
    reference = box(b"dref", _full(struct.pack(">I", 1) + box(b"url ", b"\0\0\0\1")))
    kind = (
        box(b"vmhd", struct.pack(">I8x", 1)) if track.handler == b"vide" else box(b"smhd", bytes(8))
    )
    media = box(
        b"mdia",
        box(b"mdhd", _full(struct.pack(">IIIIHH", 0, 0, track.timescale, total, 0x55C4, 0))),
        box(b"hdlr", _full(struct.pack(">I4s12x", 0, track.handler) + b"\0")),
        box(
            b"minf",
            kind,
            box(b"dinf", reference),
            box(b"stbl", *(box(name, body) for name, body in tables.items())),
        ),
    )
    shown = struct.pack(">IIIII8xHHHH", 0, 0, 1, 0, milliseconds, 0, 0, 0, 0)
    shown += _matrix(track.turn, height, width) + struct.pack(">II", width << 16, height << 16)
    edits = [struct.pack(">IiHH", length, first, 1, 0) for length, first in track.edits]
    movie = struct.pack(">IIIIIH10x", 0, 0, 1000, milliseconds, 0x10000, 0x100)
    movie += _matrix(0, height, width) + bytes(24) + struct.pack(">I", 2)
    return (
        head
        + box(b"mdat", *samples)
        + box(
            b"moov",
            box(b"mvhd", _full(movie)),
            box(
                b"trak",
                box(b"tkhd", struct.pack(">I", 3), shown),
                box(b"edts", box(b"elst", _full(_table(edits)))) if edits else b"",
                media,
            ),
        )
    )


def _full(body: bytes) -> bytes:
    """Prepends version 0 and no flags."""
    return bytes(4) + body


def _table(rows: Sequence[bytes]) -> bytes:
    return struct.pack(">I", len(rows)) + b"".join(rows)


def _matrix(turn: int, height: int, width: int) -> bytes:
    """Returns the matrix of section 8.2.2 that turns a frame and moves it back to the origin."""
    a, b, c, d = TURNS[turn]
    x = -min(0, a * width, c * height, a * width + c * height)
    y = -min(0, b * width, d * height, b * width + d * height)
    one = 1 << 16
    return struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, x * one, y * one, 1 << 30)
