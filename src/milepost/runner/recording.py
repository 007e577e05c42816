"""Records a runner's inputs and results in a file from which its steps can be run again.

A record is a frame (`milepost.frames`) of msgpack. The configuration comes first. Each plan follows
before it is launched, then how its tokens are sampled, then its result when that is read, or a
rollback. Two steps may be in flight, so the second plan may precede the first result.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.frames import framed, read_frames
from milepost.scheduler.plans import StepPlan, StepResult, StepSampling


class Heading(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The configuration that the records belong to, without the token, since files are handed
    on."""

    config: EngineConfig


class Rollback(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The steps in flight were rolled back: they have no results."""


class PoolRelease(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The contents of the pools were dropped: see `Pools.release`."""


class PictureRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The pixels of a picture, recorded before the plan that encodes it."""

    identity: bytes
    rows: bytes
    """[patches, bytes] uint8"""
    grid: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the pixels."""
        return len(self.rows)


Record = Heading | StepPlan | StepSampling | StepResult | Rollback | PoolRelease | PictureRecord


class Log(Protocol):
    """Receives a runner's inputs and results."""

    def write(self, record: Record) -> None: ...


class PlanLog:
    """Writes whole records to a `GrowingFile`. Raises ConfigError if the file cannot be opened."""

    def __init__(self, path: str, config: EngineConfig) -> None:
        self._file = GrowingFile("record_plans", path, mode=0o644)
        self.close = self._file.close
        self._encoder = msgspec.msgpack.Encoder()
        self.write(Heading(config=replace(config, hf_token=None)))

    def write(self, record: Record) -> None:
        self._file.write(framed(self._encoder.encode(record)))


def read_records(path: str | Path) -> Iterator[Record]:
    """Yields the records of a file, up to one that was cut short."""
    decoder = msgspec.msgpack.Decoder(Record)
    with Path(path).open("rb") as file:
        yield from map(decoder.decode, read_frames(file.read))


logger = logging.getLogger(__name__)


class GrowingFile:
    """A new file; messages name it by its `option`. Call `close`, or drop it. Raises ConfigError if
    it cannot be opened.

    If a write fails, as on a full disk, the file keeps its whole pieces, the log says so, and the
    recorded work goes on.
    """

    def __init__(self, option: str, path: str, *, mode: int) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        except OSError as error:
            raise ConfigError(f"{option}={path!r}: {error.strerror}") from error
        self._option = option
        self._file = file
        self._num_bytes = 0
        """Length of the file up to the end of its last whole piece."""
        self.is_full = False
        """Whether a write has failed, so that nothing more is written."""
        self.close = weakref.finalize(self, os.close, file)

    def write(self, piece: bytes) -> None:
        if self.is_full:
            return
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.is_full = True
            logger.error("%s: %s: nothing more is recorded", self._option, error.strerror)
            with suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
        else:
            self._num_bytes += len(piece)
