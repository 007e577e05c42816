"""Remembers prepared images. An agent sends all screenshots of its conversation again with every
turn: each is decoded once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from milepost.engine.media.prepared import Prepared

MAX_BYTES = 2**30
"""Number of bytes of prepared images to keep."""


class KeptImages:
    """The most recently used prepared images by key, up to a number of bytes. May be used from
    several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Prepared | None:
        """Returns an image, if it is kept."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: Prepared) -> None:
        """Keeps an image, and drops the least recently used ones if there are too many bytes."""
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self.num_bytes += image.num_bytes
            while self.num_bytes > self._max_bytes:
                _, old = self._images.popitem(last=False)
                self.num_bytes -= old.num_bytes
