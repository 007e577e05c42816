"""Pixels on their way to the engine process: a picture that many requests have is sent once.

Both ends keep the pictures that were used last. They follow the same messages, so the client knows
what the engine still has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from milepost.engine.media import KeptImages
from milepost.engine.processes.wire import Pixels, SamePixels, frame
from milepost.runner.recording import PictureRecord

MAX_BYTES = 2**28
"""Number of bytes of pixels that the engine keeps beside those of its requests."""


class SentPixels:
    """Tells pictures that the engine has from new ones, for the client."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._kept: KeptImages[Pixels] = KeptImages(max_bytes)

    def before(self, records: Sequence[PictureRecord]) -> Iterator[bytes]:
        """Yields the bytes to send before a request with these pictures."""
        for record in records:
            if self._kept.get(record.identity) is not None:
                yield frame(SamePixels(record.identity))
                continue
            pixels = Pixels(record.identity, record.grid, record.num_bytes)
            self._kept.put(record.identity, pixels)
            yield frame(pixels)
            yield record.rows


class ReceivedPixels:
    """Gathers the pictures of the next request, for the engine."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._kept: KeptImages[PictureRecord] = KeptImages(max_bytes)
        self._waiting: list[PictureRecord] = []

    def take(self, message: PictureRecord | SamePixels) -> None:
        """Takes a picture of the next request."""
        if isinstance(message, PictureRecord):
            self._kept.put(message.identity, message)
            self._waiting.append(message)
            return
        found = self._kept.get(message.identity)
        assert found is not None, "both ends keep the same pictures"
        self._waiting.append(found)

    def of_request(self) -> tuple[PictureRecord, ...]:
        """Returns the pictures of the request that has just arrived."""
        found, self._waiting = self._waiting, []
        return tuple(found)
