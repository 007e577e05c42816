"""Records the requests of an engine for `milepost simulate`: lengths, times and hashes of prompts'
pages, no text and no token.

Hashes are keyed by a random number that lives as long as the process, so nobody can test whether a
known prompt is among them. Lines are in order of arrival, as the simulator expects; a line is
written once its request and all before it are over.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.runner.recording import GrowingFile

ID_BYTES = 6
"""Size of ids: numbers of this size are exact in every reader of JSON."""


@dataclass(slots=True)
class _Entry:
    arrived_ms: int
    lines: list[bytes] | None = None
    """The request's lines, once it is over."""


class TraceRecorder:
    """Writes whole lines to a `GrowingFile`. Raises ConfigError if it cannot be opened.

    `now` tells the time in seconds from any start.
    """

    def __init__(self, path: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._file = GrowingFile("record_trace", path, mode=0o600)
        self._now = now
        self._start_s = now()
        self._key = os.urandom(16)
        self._entries: dict[int, _Entry] = {}
        """Entries by the group's number, in order of arrival."""
        self._order: deque[int] = deque()

    def begin(self, group: RequestGroup) -> None:
        """Records that a request has arrived."""
        if self._file.is_full:
            return
        arrived_ms = int(1000 * (self._now() - self._start_s))
        self._entries[group.number] = _Entry(arrived_ms)
        self._order.append(group.number)

    def end(self, group: RequestGroup) -> None:
        """Records that a request is over, however it ended."""
        entry = self._entries.get(group.number)
        if entry is None or entry.lines is not None:
            return
        entry.lines = [
            json.dumps(self._row(entry.arrived_ms, answer)).encode() + b"\n"
            for answer in group.completions
        ]
        while self._order and (first := self._entries[self._order[0]]).lines is not None:
            self._file.write(b"".join(first.lines))
            del self._entries[self._order.popleft()]

    def close(self) -> None:
        """Writes the requests that are over, even if earlier ones are not."""
        for number in self._order:
            self._file.write(b"".join(self._entries[number].lines or ()))
        self._entries.clear()
        self._order.clear()
        self._file.close()

    def _row(self, arrived_ms: int, answer: Completion) -> dict[str, Any]:
        request = answer.request
        num_pages = request.num_prompt_tokens // request.chain.page_size
        digests = request.chain.digests(num_pages)[:num_pages]
        row = {
            "timestamp_ms": arrived_ms,
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": [self._id(digest) for digest in digests],
        }
        shown = [(p.offset, p.num_tokens, self._id(p.identity)) for p in request.chain.pictures]
        return row | ({"images": shown} if shown else {})

    def _id(self, digest: bytes) -> int:
        return int.from_bytes(blake2b(digest, digest_size=ID_BYTES, key=self._key).digest())
