"""The messages between the engine process and its client, and their format on the socket.

A frame (`milepost.frames`) holds msgpack: plain values, never code. `Frames` cuts a byte stream
into messages and does no I/O; both sides use it. Pixels of pictures are no frames: they follow the
message `Pixels` as they are, and are neither packed nor copied whole.

    client -> engine    Pixels, SamePixels, Add, Abort, Ask, Stop
    engine -> client    Ready, once; then Outputs, Refused, Reply; Failed before a bad end

Every `Add` is followed by exactly one end (an Output with `finished`, or Refused), unless an
`Abort` comes first: outputs that were under way then may still arrive, and are dropped.
"""

from __future__ import annotations

from array import array
from typing import Any, Generic, Literal, TypeVar

import msgspec

from milepost.engine.facts import Facts
from milepost.engine.media import ImageFacts
from milepost.engine.metrics import Metric
from milepost.engine.outputs import Output
from milepost.engine.prompts import Prompt
from milepost.engine.validation import Limits
from milepost.errors import InvalidRequestError, MilepostError, QueueWaitError
from milepost.frames import LENGTH, framed
from milepost.kv_transfer_params import as_read
from milepost.pictures import Picture
from milepost.runner.recording import PictureRecord
from milepost.sampling_params import SamplingParams

M = TypeVar("M")

MAX_FRAME_BYTES = 2**30
"""Limit of a message's length. A greater length means that the stream is corrupt."""


# --- to the engine --------------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queues a prompt under a number chosen by the client, which keeps its text."""

    number: int
    tokens: bytes
    """Token ids as packed uint32 (`Prompt.packed`). As a list of numbers, a long prompt would take
    longer to write and read than to look up in the cache."""
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    cache_marks: tuple[int, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None
    pictures: tuple[Picture, ...] = ()
    pixels: tuple[PictureRecord, ...] = ()
    """Not sent with the message: `Pixels` and `SamePixels` precede it."""

    @staticmethod
    def of(number: int, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Add:
        """Returns the message for a valid prompt."""
        return Add(
            number=number,
            tokens=prompt.packed.tobytes(),
            params=params,
            priority=priority,
            cache_salt=prompt.cache_salt,
            cache_marks=prompt.cache_marks,
            kv_transfer_params=as_read(prompt.kv_transfer_params),
            pictures=prompt.pictures,
        )

    @property
    def prompt(self) -> Prompt:
        """Returns the prompt as the engine validates it."""
        return Prompt(
            token_ids=array("I", self.tokens),
            cache_salt=self.cache_salt,
            cache_marks=self.cache_marks,
            kv_transfer_params=self.kv_transfer_params,
            pictures=self.pictures,
            pixels=self.pixels,
        )


class Pixels(msgspec.Struct, tag=True, frozen=True):
    """A picture of the next Add. Its pixels follow the message."""

    identity: bytes
    grid: tuple[int, int, int]
    num_bytes: int


class SamePixels(msgspec.Struct, tag=True, frozen=True):
    """A picture of the next Add whose pixels the engine still has."""

    identity: bytes


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request before the next step."""

    number: int


Question = Literal[
    "alive", "metrics", "release_cache", "reset_prefix_cache", "reset_with_files", "state"
]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question that is answered between two steps; `state` takes several of them."""

    id: int
    what: Question


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Ends the process. Whatever is running is dropped."""


ToEngine = Pixels | SamePixels | Add | Abort | Ask | Stop


# --- to the client --------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Reports that the engine can take requests."""

    model: str
    limits: Limits
    """Limits that requests are validated against before they are sent."""
    page_size: int
    num_pages: int
    num_slots: int
    sampling_defaults: dict[str, int | float]
    """Fields of SamplingParams for requests that do not set them."""
    facts: Facts
    images: ImageFacts | None = None
    """How images enter prompts; None for a model that takes none."""
    identity: bytes = b""
    """The identity of the model, on which the keys of what it caches depend."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not be built, or a step failed; the process is about to end. `kind` is the
    name of one of our errors."""

    kind: str
    message: str

    @staticmethod
    def of(error: MilepostError) -> Failed:
        return Failed(kind=type(error).__name__, message=str(error))


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """The tokens that all requests gained in a step."""

    outputs: list[Output]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request was not accepted, and why."""

    number: int
    message: str
    retry_after_s: int | None = None
    """Seconds after which the request may be sent again; None if it would be refused again."""

    @property
    def error(self) -> MilepostError:
        """The error for the caller."""
        if self.retry_after_s is None:
            return InvalidRequestError(self.message)
        return QueueWaitError(self.message, retry_after_s=self.retry_after_s)


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The answer to an Ask."""

    id: int
    metrics: list[Metric] | None = None
    done: bool | None = None
    state: bytes | None = None
    """The engine's state as JSON, for the page."""


ToClient = Ready | Failed | Outputs | Refused | Reply


# --- frames ---------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """Returns a message as a frame."""
    return framed(_ENCODER.encode(message))


class Frames(Generic[M]):
    """Cuts what arrives into messages of one type. `kind` is the type as msgspec reads it: `Pixels`
    among its members stands for a `PictureRecord` among the messages."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()
        self._pixels: Pixels | None = None
        """The picture whose pixels are arriving."""
        self._rows, self._num_rows_bytes = bytearray(), 0

    def feed(self, data: bytes) -> list[M]:
        """Returns the messages that have arrived whole; in place of `Pixels` the picture, once its
        pixels are there. Raises ValueError for bytes that are no message."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while True:
            if self._pixels is not None:
                start += self._fill(start)
                if self._num_rows_bytes < self._pixels.num_bytes:
                    break
                messages.append(self._picture(self._pixels))
                self._pixels = None
            if len(self._buffer) - start < LENGTH.size:
                break
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes: the stream is out of step")
            body = start + LENGTH.size
            if len(self._buffer) - body < length:
                break
            start = body + length
            message = self._decoder.decode(bytes(self._buffer[body:start]))
            if isinstance(message, Pixels):
                self._pixels = message
                self._rows, self._num_rows_bytes = bytearray(message.num_bytes), 0
            else:
                messages.append(message)
        del self._buffer[:start]
        return messages

    def _fill(self, start: int) -> int:
        """Takes pixels from the buffer. Returns the number of their bytes."""
        first = self._num_rows_bytes
        num = min(len(self._buffer) - start, len(self._rows) - first)
        self._rows[first : first + num] = self._buffer[start : start + num]
        self._num_rows_bytes += num
        return num

    def _picture(self, pixels: Pixels) -> PictureRecord:
        rows: Any = self._rows  # not copied into bytes, which a slice of it would be equal to
        return PictureRecord(identity=pixels.identity, rows=rows, grid=pixels.grid)
