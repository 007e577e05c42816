"""The cache's events as vLLM's publish them: what a router reads.

A page is announced while a checkpoint at or behind its end can be resumed from, and withdrawn when
the last one goes, wherever the page itself is by then. So for a prompt that goes on where a state
was kept, the longest run of announced pages is what it hits, up to a page. Pages under a salt are
kept quiet: routers cannot know whose they are. Pure: no socket, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from milepost.cache.events import Cleared, Event, PagesReachable, PagesUnreachable

_ENCODER = msgspec.msgpack.Encoder()
MEDIUM = "GPU"
"""What routers call the memory that an engine computes in, whatever it is."""

_Fields = dict[str, Any]


class Messages:
    """Knows which keys have a salt, to be silent about their end too."""

    def __init__(self, page_size: int, form: Literal["map", "array"]) -> None:
        self._page_size = page_size
        self._is_map = form == "map"
        self._salted: set[bytes] = set()

    def payload(self, events: Iterable[Event], now_s: float) -> bytes | None:
        """One message's payload, of all that routers are told of these events; None for nothing."""
        found = [self._shaped(kind, fields) for kind, fields in map(self._told, events) if kind]
        return _ENCODER.encode([now_s, found, 0]) if found else None

    def _told(self, event: Event) -> tuple[str, _Fields]:
        """Type and fields; no type for what routers are not told."""
        match event:
            case PagesReachable(is_salted=True):
                self._salted.update(event.keys)
            case PagesReachable():
                return "BlockStored", self._stored(event)
            case PagesUnreachable():
                keys = [key for key in event.keys if key not in self._salted]
                self._salted.difference_update(event.keys)
                if keys:
                    return "BlockRemoved", {"block_hashes": keys, "medium": MEDIUM}
            case Cleared():
                self._salted.clear()
                return "AllBlocksCleared", {}
        return "", {}

    def _stored(self, event: PagesReachable) -> _Fields:
        return {
            "block_hashes": event.keys,
            "parent_block_hash": event.parent if event.position else None,
            "token_ids": array("I", event.tokens).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }

    def _shaped(self, kind: str, fields: _Fields) -> object:
        return {"type": kind, **fields} if self._is_map else [kind, *fields.values()]
