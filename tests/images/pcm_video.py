"""Writes H.264 and H.265 videos without an encoder: every block is PCM, so pixels come back exactly
as they were written. Syntax elements have the names of ITU-T H.264 and H.265, chapter 7.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Planes = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Y [height, width], Cb and Cr [height / 2, width / 2] of a frame, both sides even."""
_BLOCK = 16


@dataclass(frozen=True)
class Colour:
    """How a stream says that its numbers are to be read."""

    is_full: bool = False
    matrix: int = 2
    """1 is BT.709, 5 and 6 are BT.601, 2 says nothing."""


@dataclass(frozen=True)
class Stream:
    """A coded video: one sample per frame, and the entry of `stsd` that describes them."""

    entry: bytes
    samples: list[bytes]
    height: int
    width: int


class _Bits:
    def __init__(self) -> None:
        self._bits: list[str] = []

    def u(self, count: int, *values: int) -> _Bits:
        """Appends each value as an unsigned number of `count` bits."""
        self._bits += [f"{value:0{count}b}" for value in values]
        return self

    def ue(self, *values: int) -> _Bits:
        """Appends each value as an Exp-Golomb code."""
        for value in values:
            code = f"{value + 1:b}"
            self._bits.append("0" * (len(code) - 1) + code)
        return self

    def aligned(self) -> bytes:
        """Returns all bits, and zeros up to a whole byte."""
        joined = "".join(self._bits)
        joined += "0" * (-len(joined) % 8)
        return int(joined, 2).to_bytes(len(joined) // 8, "big")

    def trailed(self) -> bytes:
        """Returns all bits with `rbsp_trailing_bits`."""
        return self.u(1, 1).aligned()


def h264(frames: Sequence[Planes], colour: Colour | None = None) -> Stream:
    """Codes each frame as an IDR picture of the Baseline profile."""
    height, width = frames[0][0].shape
    rows, columns = -(-height // _BLOCK), -(-width // _BLOCK)
    sps = _Bits().u(8, 66, 0xC0, 52).ue(0, 0, 2, 1).u(1, 0)
    sps.ue(columns - 1, rows - 1).u(1, 1, 1, 1)  # frame_mbs_only, direct_8x8, frame_cropping
    sps.ue(0, (columns * _BLOCK - width) // 2, 0, (rows * _BLOCK - height) // 2)
    _write_vui(sps, colour, 6)
    pps = _Bits().ue(0, 0).u(1, 0, 0).ue(0, 0, 0).u(1, 0).u(2, 0).ue(0, 0, 0).u(1, 1, 0, 0)
    sps_nal, pps_nal = _nal(b"\x67", sps.trailed()), _nal(b"\x68", pps.trailed())
    config = (
        bytes([1, 66, 0xC0, 52, 0xFF, 0xE1]) + _sized(sps_nal, 2) + b"\x01" + _sized(pps_nal, 2)
    )
    samples = []
    for number, frame in enumerate(frames):
        head = _Bits().ue(0, 7, 0).u(4, 0).ue(number % 2).u(1, 0, 0).ue(0, 1)
        pcm = _Bits().ue(25).aligned()  # mb_type I_PCM, where the last block ended on a byte
        blocks = _blocks(frame)
        body = head.ue(25).aligned() + pcm.join(blocks) + b"\x80"
        samples.append(_sized(_nal(b"\x65", body), 4))
    return Stream(_entry(b"avc1", b"avcC", config, height, width), samples, height, width)


def h265(frames: Sequence[Planes], colour: Colour | None = None) -> Stream:
    """Codes each frame as an IDR picture of the Main profile, each block as a slice: so the bits of
    the arithmetic coder around its samples are the same for all."""
    height, width = frames[0][0].shape
    rows, columns = -(-height // _BLOCK), -(-width // _BLOCK)
    level = _Bits().u(2, 0).u(1, 0).u(5, 1).u(32, 0x60000000).u(4, 0b1001).u(44, 0).u(8, 153)
    level = level.aligned()
    vps = _Bits().u(4, 0).u(1, 1, 1).u(6, 0).u(3, 0).u(1, 1).u(16, 0xFFFF).u(96, _number(level))
    vps.u(1, 1).ue(0, 0, 0).u(6, 0).ue(0).u(1, 0, 0)
    sps = _Bits().u(4, 0).u(3, 0).u(1, 1).u(96, _number(level)).ue(0, 1)
    sps.ue(columns * _BLOCK, rows * _BLOCK).u(1, 1)
    sps.ue(0, (columns * _BLOCK - width) // 2, 0, (rows * _BLOCK - height) // 2)
    sps.ue(0, 0, 0).u(1, 1).ue(0, 0, 0)  # depths, order counts, the buffer of pictures
    sps.ue(1, 0, 0, 2, 0, 0)  # coding blocks of 16, transforms of 4 to 16
    sps.u(1, 0, 0, 0, 1).u(4, 7, 7).ue(1, 0).u(1, 1)  # PCM of 8 bits in blocks of 16, unfiltered
    sps.ue(0).u(1, 0, 0, 0)
    _write_vui(sps, colour, 7)
    sps.u(1, 0)
    pps = _Bits().ue(0, 0).u(1, 0, 0).u(3, 0).u(1, 0, 0).ue(0, 0, 0).u(1, 0, 0, 0).ue(0, 0)
    pps.u(1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0).ue(0).u(1, 0, 0)
    sets = [(32, vps), (33, sps), (34, pps)]
    nals = [(kind, _nal(bytes([kind << 1, 1]), bits.trailed())) for kind, bits in sets]
    config = b"\x01" + level + b"\xf0\0\xfc\xfd\xf8\xf8\0\0\x0f" + bytes([len(nals)])
    config += b"".join(bytes([0x80 | kind, 0, 1]) + _sized(nal, 2) for kind, nal in nals)
    address_bits = (rows * columns - 1).bit_length()
    samples = []
    for frame in frames:
        slices = []
        for address, block in enumerate(_blocks(frame)):
            head = _Bits().u(1, address == 0, 0).ue(0)
            if address:
                head.u(address_bits, address)
            head.ue(2).ue(0)
            body = head.trailed() + _Bits().u(9, 0b100001101).aligned() + block
            slices.append(_sized(_nal(b"\x26\x01", body + _Bits().u(9, 0b111111101).aligned()), 4))
        samples.append(b"".join(slices))
    return Stream(_entry(b"hvc1", b"hvcC", config, height, width), samples, height, width)


def _write_vui(sps: _Bits, colour: Colour | None, num_flags: int) -> None:
    """Appends `vui_parameters` with the colour, if there is one. `num_flags` are the flags after
    it, all unset."""
    if colour is None:
        sps.u(1, 0)
        return
    sps.u(1, 1, 0, 0, 1).u(3, 5).u(1, colour.is_full, 1).u(8, colour.matrix, 2, colour.matrix)
    sps.u(num_flags, 0)


def _blocks(planes: Planes) -> list[bytes]:
    """Returns the samples of each block of 16 x 16 pixels, Y before Cb before Cr, row by row."""
    padded = []
    for plane, side in zip(planes, (_BLOCK, _BLOCK // 2, _BLOCK // 2), strict=True):
        height, width = plane.shape
        whole = np.pad(plane, ((0, -height % side), (0, -width % side)), mode="edge")
        rows, columns = whole.shape[0] // side, whole.shape[1] // side
        padded.append(whole.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side**2))
    return [block.tobytes() for block in np.concatenate(padded, axis=1)]


def _nal(header: bytes, payload: bytes) -> bytes:
    """Returns a NAL unit: after two zeros no byte is below four (emulation prevention)."""
    escaped = bytearray()
    zeros = 0
    for byte in payload:
        if zeros == 2 and byte < 4:
            escaped.append(3)
            zeros = 0
        escaped.append(byte)
        zeros = 0 if byte else zeros + 1
    return header + bytes(escaped)


def _sized(data: bytes, count: int) -> bytes:
    return len(data).to_bytes(count, "big") + data


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def box(kind: bytes, *parts: bytes) -> bytes:
    """Returns a box of ISO/IEC 14496-12, section 4.2."""
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def _entry(kind: bytes, config_kind: bytes, config: bytes, height: int, width: int) -> bytes:
    """Returns the sample entry of a coded video (section 12.1.3)."""
    head = struct.pack(">6xH16xHHIII", 1, width, height, 0x480000, 0x480000, 0)
    rest = struct.pack(">H32sHh", 1, b"", 24, -1)
    return box(kind, head, rest, box(config_kind, config))
