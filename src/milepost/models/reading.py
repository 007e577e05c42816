"""Copies tensors of a safetensors file to a device at the speed of the disk, or of the page cache.

Threads read the file piece by piece, in order and some pieces ahead; a piece holds many small
tensors, or a part of a large one. From pinned memory, a piece reaches the device in one copy that
overlaps with the next reads, and its tensors are views of the copy. Besides the model, the device
holds one piece, or one tensor that is larger than a piece.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from milepost.errors import WeightsError

_NUM_AHEAD = 8
"""Number of threads, and of pieces that are being read or waiting to be taken."""
_PIECE_BYTES = 32 << 20
_MAX_GAP = 1 << 20
"""Largest gap in bytes between two tensors that is read rather than skipped."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Extent:
    """Position of a tensor in its file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Piece:
    begin: int
    end: int
    extents: tuple[Extent, ...]
    """The tensors in the piece, or the one that it is a part of."""

    @property
    def is_part(self) -> bool:
        first = self.extents[0]
        return self.begin > first.begin or self.end < first.end


@dataclass(frozen=True, slots=True)
class Header:
    """A file's description of its tensors."""

    text: bytes
    entries: Mapping[str, Mapping[str, Any]]

    def bounds(self, name: str) -> tuple[int, int]:
        """Returns where a tensor begins and ends in the file."""
        begin, end = self.entries[name]["data_offsets"]
        return 8 + len(self.text) + begin, 8 + len(self.text) + end


def read_header(file: Path) -> Header:
    """Reads the header of a complete file, one that safetensors has already opened and checked."""
    with file.open("rb") as opened:
        text = opened.read(int.from_bytes(opened.read(8), "little"))
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return Header(text, entries)


def read_extents(file: Path, names: Sequence[str]) -> list[Extent]:
    """Returns the extents of the named tensors of a complete file, in the file's order."""
    header, extents = read_header(file), []
    for name in names:
        entry = header.entries[name]
        begin, end = header.bounds(name)
        extents.append(Extent(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end))
    return sorted(extents, key=lambda extent: extent.begin)


class Reader:
    """Reads files to one device and reuses its staging memory for every file. Use it in a `with`
    statement."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._free: list[Tensor] = []
        self._threads = ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="reading")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, file: Path, extents: Sequence[Extent]) -> Iterator[tuple[Extent, Tensor]]:
        """Yields each tensor on the device, in the order of `extents`, which is the file's. A
        tensor is valid until the next one is asked for. Raises WeightsError."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            yield from self._assemble(self._pieces(file, descriptor, _cut(extents)))
        finally:
            os.close(descriptor)

    def _assemble(self, pieces: Iterator[tuple[_Piece, Tensor]]) -> Iterator[tuple[Extent, Tensor]]:
        """Yields tensors assembled from the bytes of pieces."""
        whole: Tensor | None = None
        for piece, held in pieces:
            if not piece.is_part:
                for extent in piece.extents:
                    part = held[extent.begin - piece.begin : extent.end - piece.begin]
                    yield extent, _as_tensor(part, extent)
                continue
            (extent,) = piece.extents
            if whole is None:
                whole = torch.empty(
                    extent.end - extent.begin, dtype=torch.uint8, device=self._device
                )
            whole[piece.begin - extent.begin : piece.end - extent.begin].copy_(held)
            if piece.end == extent.end:
                yield extent, _as_tensor(whole, extent)
                whole = None

    def _pieces(
        self, file: Path, descriptor: int, pieces: Iterator[_Piece]
    ) -> Iterator[tuple[_Piece, Tensor]]:
        """Yields each piece with its bytes on the device."""
        ahead: deque[tuple[_Piece, Future[Tensor]]] = deque()
        try:
            while True:
                while len(ahead) < _NUM_AHEAD and (piece := next(pieces, None)) is not None:
                    staged = self._take_staging()
                    ahead.append((piece, self._threads.submit(_read, descriptor, piece, staged)))
                if not ahead:
                    return
                piece, future = ahead.popleft()
                staged = self._result(file, future)
                held, done = self._send(staged[: piece.end - piece.begin])
                yield piece, held
                done()
                self._free.append(staged)
        finally:
            # Reads that are still running must not lose their file.
            for _, future in ahead:
                future.cancel() or future.exception()

    def _result(self, file: Path, future: Future[Tensor]) -> Tensor:
        try:
            return future.result()
        except OSError as error:
            raise WeightsError(f"{file}: cannot be read ({error}); download it again") from error

    def _send(self, staged: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Returns the bytes on the device, and a function that waits until the staging memory may
        be overwritten."""
        if not self._is_pinned:
            return staged, lambda: None
        held = staged.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return held, event.synchronize

    def _take_staging(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)


def _cut(extents: Sequence[Extent]) -> Iterator[_Piece]:
    """Yields pieces of at most _PIECE_BYTES."""
    held: list[Extent] = []
    for extent in extents:
        fits = held and (
            extent.end - held[0].begin <= _PIECE_BYTES and extent.begin - held[-1].end <= _MAX_GAP
        )
        if held and not fits:
            yield _Piece(held[0].begin, held[-1].end, tuple(held))
            held = []
        if extent.end - extent.begin <= _PIECE_BYTES:
            held.append(extent)
            continue
        for begin in range(extent.begin, extent.end, _PIECE_BYTES):
            yield _Piece(begin, min(begin + _PIECE_BYTES, extent.end), (extent,))
    if held:
        yield _Piece(held[0].begin, held[-1].end, tuple(held))


def _read(descriptor: int, piece: _Piece, staged: Tensor) -> Tensor:
    """Fills `staged` with a piece's bytes; raises OSError."""
    room = memoryview(staged.numpy().data)[: piece.end - piece.begin]
    at = piece.begin
    while len(room):
        count = os.preadv(descriptor, [room], at)
        if not count:
            raise OSError(f"it ends at byte {at}, before {piece.end}")
        room, at = room[count:], at + count
    return staged


def _as_tensor(held: Tensor, extent: Extent) -> Tensor:
    """Views bytes as a tensor of the extent's dtype and shape. Bytes at a misaligned offset are
    copied first."""
    if held.storage_offset() % extent.dtype.itemsize:
        held = held.clone()
    return held.view(extent.dtype).view(extent.shape)
