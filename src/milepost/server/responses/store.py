"""Stored responses, in memory and bounded: the oldest go first.

Each belongs to the API key that it was made with; nobody else finds it. None outlives the server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.server.responses.items import Item

MAX_RESPONSES = 4096
MAX_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation up to its end, without instructions."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    conversation: Sequence[Item]
    num_bytes: int
    """Of the whole conversation as JSON, so that long chains count for all that they keep alive."""


class ResponseStore:
    """The stored responses of one server."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, owner: str, id_: str) -> StoredResponse | None:
        return self._stored.get((owner, id_))

    def put(self, owner: str, id_: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than the whole store is not kept."""
        self._stored[owner, id_] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def delete(self, owner: str, id_: str) -> bool:
        """Whether there was such a response."""
        stored = self._stored.pop((owner, id_), None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        return True
