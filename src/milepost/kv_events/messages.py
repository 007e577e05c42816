"""The cache's events as vLLM's publish them: what a router reads.

A page is announced for a memory while a checkpoint there, at or behind its end, can be resumed
from, and withdrawn when the last one goes, wherever the page itself is by then. So for a prompt
that goes on where a state was kept, the longest run of announced pages is what it hits, up to a
page. Pages under a salt are kept quiet: routers cannot know whose they are. Pure: no socket, no
clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from milepost.cache.events import Cleared, Event, PagesReachable, PagesUnreachable, Where
from milepost.cache.tree import TOKEN_BYTES

_ENCODER = msgspec.msgpack.Encoder()
MEDIA: dict[Where, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
"""What routers call them; the memory that an engine computes in is GPU, whatever it is."""

MAX_EVENTS, MAX_BLOCKS = 1000, 2048
"""Of one message: routers refuse those of more than 4096 events or 16 MiB, and then forget all that
they know of a server."""

_Fields = dict[str, Any]


class Messages:
    """Knows which keys have a salt, to be silent about their end too."""

    def __init__(self, page_size: int, form: Literal["map", "array"]) -> None:
        self._page_size = page_size
        self._is_map = form == "map"
        self._salted: set[bytes] = set()

    def payloads(self, events: Iterable[Event], now_s: float) -> Iterator[bytes]:
        """Messages' payloads, of all that routers are told of these events."""
        found: list[object] = []
        num_blocks = 0
        for kind, fields in (told for event in events for told in self._told(event)):
            own = len(fields.get("block_hashes", ()))
            if len(found) == MAX_EVENTS or num_blocks + own > MAX_BLOCKS:
                yield _ENCODER.encode([now_s, found, 0])
                found, num_blocks = [], 0
            found.append(self._shaped(kind, fields))
            num_blocks += own
        if found:
            yield _ENCODER.encode([now_s, found, 0])

    def _told(self, event: Event) -> Iterator[tuple[str, _Fields]]:
        """Type and fields of what routers are told."""
        match event:
            case PagesReachable(is_salted=True):
                self._salted.update(event.keys)
            case PagesReachable():
                for first in range(0, len(event.keys), MAX_BLOCKS):
                    yield "BlockStored", self._stored(event, first)
            case PagesUnreachable():
                keys = [key for key in event.keys if key not in self._salted]
                self._salted.difference_update(event.keys)
                for first in range(0, len(keys), MAX_BLOCKS):
                    own = keys[first : first + MAX_BLOCKS]
                    fields = {"block_hashes": own, "medium": MEDIA[event.where]}
                    yield "BlockRemoved", fields
            case Cleared():
                self._salted.clear()
                yield "AllBlocksCleared", {}

    def _stored(self, event: PagesReachable, first: int) -> _Fields:
        """Of the pages from there on, at most as many as a message takes."""
        keys = event.keys[first : first + MAX_BLOCKS]
        parent = event.keys[first - 1] if first else event.parent
        start = TOKEN_BYTES * self._page_size * first
        tokens = event.tokens[start : start + TOKEN_BYTES * self._page_size * len(keys)]
        return {
            "block_hashes": keys,
            "parent_block_hash": parent if event.position or first else None,
            "token_ids": array("I", tokens).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIA[event.where],
            "lora_name": None,
        }

    def _shaped(self, kind: str, fields: _Fields) -> object:
        return {"type": kind, **fields} if self._is_map else [kind, *fields.values()]
