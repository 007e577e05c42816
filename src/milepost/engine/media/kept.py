"""Remembers images. An agent sends all screenshots of its conversation again with every turn: each
is decoded once, and its pixels go to the engine once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """An image of that many bytes."""

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)

MAX_BYTES = 2**30
"""Number of bytes of prepared images to keep."""


class KeptImages(Generic[T]):
    """Images by key, the ones used last, up to a number of bytes. The same calls in the same order
    keep the same images. Several threads may use one."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """Returns an image, if it is kept."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: T) -> None:
        """Keeps an image, and forgets those that were not used for longest."""
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self.num_bytes += image.num_bytes
            while self.num_bytes > self._max_bytes:
                _, old = self._images.popitem(last=False)
                self.num_bytes -= old.num_bytes
