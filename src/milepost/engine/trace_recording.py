"""Records the requests of an engine for `milepost simulate`: lengths, times and hashes of prompts'
pages, no text and no token.

Hashes are keyed by a random number that lives as long as the process, so nobody can test whether a
known prompt is among them. Lines are in order of arrival, as the simulator expects; a line is
written once its request and all before it are over.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from milepost.engine.requests import Job
from milepost.errors import ConfigError

logger = logging.getLogger(__name__)

ID_BYTES = 6
"""Numbers of so many bytes are exact in every reader of JSON."""


@dataclass(slots=True)
class _Entry:
    arrived_ms: int
    lines: list[bytes] | None = None
    """Once it is over."""


class TraceRecorder:
    """A file that grows by whole lines. Raises ConfigError if it cannot be opened; one that takes no
    more later, on a full disk, ends the recording and nothing else.

    `now` tells the time in seconds from any start.
    """

    def __init__(self, path: str, *, now: Callable[[], float] = time.monotonic) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(f"record_trace={path!r}: {error.strerror}") from error
        self._file = file
        self._close = weakref.finalize(self, os.close, file)
        self._now = now
        self._start_s = now()
        self._key = os.urandom(16)
        self._entries: dict[int, _Entry] = {}
        """By number of the job, in order of arrival."""
        self._order: deque[int] = deque()
        self._num_bytes = 0
        """Written so far."""
        self._has_failed = False

    def begin(self, job: Job) -> None:
        """A request has come."""
        if self._has_failed:
            return
        arrived_ms = int(1000 * (self._now() - self._start_s))
        self._entries[job.number] = _Entry(arrived_ms)
        self._order.append(job.number)

    def end(self, job: Job) -> None:
        """It is over, however it ended."""
        entry = self._entries.get(job.number)
        if entry is None or entry.lines is not None:
            return
        entry.lines = [
            json.dumps(self._row(entry.arrived_ms, answer)).encode() + b"\n"
            for answer in job.answers
        ]
        while self._order and (first := self._entries[self._order[0]]).lines is not None:
            self._write(b"".join(first.lines))
            del self._entries[self._order.popleft()]

    def close(self) -> None:
        """Write what is over, though something before it is not."""
        for number in self._order:
            self._write(b"".join(self._entries[number].lines or ()))
        self._entries.clear()
        self._order.clear()
        self._close()

    def _row(self, arrived_ms: int, answer: Any) -> dict[str, Any]:
        request = answer.request
        num_pages = request.num_prompt_tokens // request.chain.page_size
        digests = request.chain.digests(num_pages)[:num_pages]
        return {
            "timestamp_ms": arrived_ms,
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": [self._id(digest) for digest in digests],
        }

    def _id(self, digest: bytes) -> int:
        return int.from_bytes(blake2b(digest, digest_size=ID_BYTES, key=self._key).digest())

    def _write(self, lines: bytes) -> None:
        if self._has_failed:
            return
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._has_failed = True
            logger.error("record_trace: %s: nothing more is recorded", error.strerror)
            with suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)  # no line in part
        else:
            self._num_bytes += len(lines)
