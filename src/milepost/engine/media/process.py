"""Prepares images in a process of its own, which can be ended: decoders of untrusted bytes may take
long, take memory, or crash. `PreparingProcess` is the other side, in an event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from milepost.engine.child import Child, answer, bound_memory, messages
from milepost.errors import InvalidPromptError, InvalidRequestError
from milepost.images.settings import ImageSettings
from milepost.runner.recording import PictureRecord

MAX_BYTES = 2 * 2**30
"""Number of bytes that the process may allocate."""
TIMEOUT_S = 20.0
"""Longest time to prepare one image. The largest takes a second or two."""


class Unprepared(msgspec.Struct, array_like=True, frozen=True):
    """A file to prepare."""

    data: bytes
    settings: ImageSettings
    max_pixels: int | None


class PreparedPicture(msgspec.Struct, array_like=True, frozen=True, tag="prepared"):
    """An image as the tower reads it."""

    record: PictureRecord
    num_tokens: int
    num_positions: int

    @staticmethod
    def of(data: Any, settings: ImageSettings, max_pixels: int | None) -> PreparedPicture:
        """Prepares a file's bytes, or an image of Pillow's, in this process. Raises
        InvalidPromptError."""
        from milepost.images import prepare

        made = prepare(data, settings, max_pixels=max_pixels)
        record = PictureRecord(identity=made.identity, rows=made.rows.tobytes(), grid=made.grid)
        return PreparedPicture(record, made.num_tokens, made.num_positions)


class _Refusal(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    message: str


class PreparingProcess:
    """Prepares one image at a time. `close` it at the end."""

    def __init__(self) -> None:
        self._child = Child("milepost.engine.media")
        self._killed: asyncio.subprocess.Process | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(PreparedPicture | _Refusal)

    async def prepare(self, asked: Unprepared) -> PreparedPicture:
        """Raises InvalidPromptError. When its caller is cancelled the work ends at once."""
        try:
            if self._child.pid is None:
                await self._kill()  # the one before, which may still be ending
                await self._child.start()
            found = await self._child.ask(self._encoder.encode(asked), TIMEOUT_S)
        except TimeoutError:
            await self._kill()
            raise InvalidPromptError(
                f"an image took more than {TIMEOUT_S:g} seconds to decode: send a smaller one"
            ) from None
        except BaseException:
            self._killed = self._child.kill()
            raise
        if found is None:
            await self._child.ended()
            raise InvalidPromptError("an image could not be decoded: its decoder ended")
        reply = self._decoder.decode(found)
        if isinstance(reply, _Refusal):
            raise InvalidPromptError(reply.message)
        return reply

    async def _kill(self) -> None:
        """Ends the process, and waits for that."""
        killed, self._killed = self._child.kill() or self._killed, None
        if killed is not None:
            await killed.wait()

    async def close(self) -> None:
        """Ends the process."""
        await self._kill()


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Prepares one image after the other, until the input ends."""
    import milepost.images.patches  # noqa: F401 - what Pillow loads is no image's memory

    decoder, encoder = msgspec.msgpack.Decoder(Unprepared), msgspec.msgpack.Encoder()
    bound_memory(MAX_BYTES)
    for message in messages():
        answer(encoder.encode(_answer(decoder.decode(message))))


def _answer(asked: Unprepared) -> PreparedPicture | _Refusal:
    try:
        return PreparedPicture.of(asked.data, asked.settings, asked.max_pixels)
    except InvalidRequestError as error:
        return _Refusal(str(error))
    except MemoryError:
        return _Refusal("an image takes too much memory to decode: send a smaller one")
