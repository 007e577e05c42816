"""A file that grows by whole pieces, so that it stays readable however the process ends."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress

from milepost.errors import ConfigError

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
        """Length of the whole pieces."""
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
