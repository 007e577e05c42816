"""Prepares images and videos in a process of its own, which can be ended: decoders of untrusted
bytes may take long, take memory, or crash. `PreparingProcess` is the other side, in an event loop.
"""

from __future__ import annotations

import msgspec

from milepost.engine.child import Child, answer, bound_memory, messages
from milepost.engine.media.prepared import Prepared, Unprepared
from milepost.errors import InvalidPromptError, InvalidRequestError

MAX_BYTES = 2 * 2**30
"""Number of bytes that the process may allocate."""
TIMEOUT_S = 20.0
"""Longest time to prepare one image. The largest takes a second or two."""


class _Refusal(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    message: str


class PreparingProcess:
    """Prepares one image at a time. `close` it at the end."""

    def __init__(self) -> None:
        self._child = Child("milepost.engine.media")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Prepared | _Refusal)

    async def prepare(self, asked: Unprepared) -> Prepared:
        """Returns the prepared image. If its caller is cancelled, the work ends at once. Raises
        InvalidPromptError."""
        try:
            if self._child.pid is None:
                await self._child.start()
            found, _ = await self._child.ask(self._encoder.encode(asked), TIMEOUT_S)
        except TimeoutError:
            raise InvalidPromptError(
                f"{asked.name} took more than {TIMEOUT_S:g} seconds to decode: send a smaller one"
            ) from None
        if found is None:
            raise InvalidPromptError(f"{asked.name} could not be decoded: its decoder ended")
        reply: Prepared | _Refusal = self._decoder.decode(found)
        if isinstance(reply, _Refusal):
            raise InvalidPromptError(reply.message)
        return reply

    async def close(self) -> None:
        """Ends the process."""
        await self._child.close()


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Prepares one image after the other, until the input ends."""
    # What Pillow and OpenCV load is no image's memory.
    import milepost.images.tiles
    import milepost.images.videos  # noqa: F401
    from milepost.images.containers import can_decode

    if can_decode():
        import cv2

        cv2.setNumThreads(1)

    decoder, encoder = msgspec.msgpack.Decoder(Unprepared), msgspec.msgpack.Encoder()
    bound_memory(MAX_BYTES)
    for message in messages():
        answer(encoder.encode(_answer(decoder.decode(message))))


def _answer(asked: Unprepared) -> Prepared | _Refusal:
    try:
        return asked.prepared()
    except InvalidRequestError as error:
        return _Refusal(str(error))
    except MemoryError:
        return _Refusal(f"{asked.name} takes too much memory to decode: send a smaller one")
