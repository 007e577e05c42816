"""The cache's events in vLLM's format, for routers.

A page is announced for a memory as long as a checkpoint there, at or after the page's end, can be
resumed from. It is withdrawn when the last such checkpoint goes, wherever the page itself is by
then. So if a prompt continues from a saved state, its longest run of announced pages is its cache
hit, to within a page. Salted pages are not announced: routers cannot know whose they are. Neither
are pages from a prompt's first picture on: routers do not see what it shows. Pure: no socket, no
clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from milepost.cache.events import Cleared, Event, PagesReachable, PagesUnreachable, Where
from milepost.cache.tree import TOKEN_BYTES, num_before_pictures

_ENCODER = msgspec.msgpack.Encoder()
MEDIA: dict[Where, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
"""Names that routers use for the memories. The memory that an engine computes in is called GPU on
any device."""

MAX_EVENTS, MAX_BLOCKS = 1000, 2048
"""Limits of one message. Routers refuse a message of more than 4096 events or 16 MiB, and then
forget everything they know of the server.
"""

_Fields = dict[str, Any]


class MessageWriter:
    """Turns events into messages, and remembers the announced pages. Only those are withdrawn, so
    salted pages are not. When the cache is cleared, each page is withdrawn first, since llm-d's
    index ignores `AllBlocksCleared` (llm-d-kv-cache at 0117c0e, pkg/kvevents/pool.go).
    """

    def __init__(
        self, page_size: int, form: Literal["map", "array"], hashes: Literal["int", "bytes"]
    ) -> None:
        self._page_size = page_size
        self._is_map = form == "map"
        self._hash: Callable[[bytes], int | bytes] = last_64_bits if hashes == "int" else bytes
        self._announced: dict[Where, dict[bytes, None]] = {where: {} for where in MEDIA}

    def payloads(self, events: Iterable[Event], now_s: float) -> Iterator[bytes]:
        """Yields the payloads of the messages that report these events to routers."""
        found: list[object] = []
        num_blocks = 0
        for kind, fields in (
            message for event in events for message in self._message_events(event)
        ):
            size = len(fields.get("block_hashes", ()))
            if len(found) == MAX_EVENTS or num_blocks + size > MAX_BLOCKS:
                yield _ENCODER.encode([now_s, found, 0])
                found, num_blocks = [], 0
            found.append(self._shaped(kind, fields))
            num_blocks += size
        if found:
            yield _ENCODER.encode([now_s, found, 0])

    def _message_events(self, event: Event) -> Iterator[tuple[str, _Fields]]:
        """Yields type and fields of each message event for one event of the cache."""
        match event:
            case PagesReachable(is_salted=False):
                keys = self._announceable(event)
                self._announced[event.where].update(dict.fromkeys(keys))
                for first in range(0, len(keys), MAX_BLOCKS):
                    yield "BlockStored", self._stored(event, first, keys)
            case PagesUnreachable():
                announced = self._announced[event.where]
                keys = [key for key in event.keys if key in announced]
                for key in keys:
                    del announced[key]
                yield from self._removed(event.where, keys)
            case Cleared():
                for where, announced in self._announced.items():
                    yield from self._removed(where, list(announced))
                    announced.clear()
                yield "AllBlocksCleared", {}

    def _removed(self, where: Where, keys: Sequence[bytes]) -> Iterator[tuple[str, _Fields]]:
        for first in range(0, len(keys), MAX_BLOCKS):
            hashes = [self._hash(key) for key in keys[first : first + MAX_BLOCKS]]
            yield "BlockRemoved", {"block_hashes": hashes, "medium": MEDIA[where]}

    def _announceable(self, event: PagesReachable) -> Sequence[bytes]:
        """Returns the pages before the first with a picture; none if there is one before the event.
        Keys of the pages after it depend on more than the tokens that a message has.
        """
        if event.position and event.parent not in self._announced[event.where]:
            return ()
        return event.keys[: num_before_pictures(event.tokens) // self._page_size]

    def _stored(self, event: PagesReachable, first: int, announced: Sequence[bytes]) -> _Fields:
        """Returns the fields that announce pages from `first` on, at most as many as a message
        takes.
        """
        keys = announced[first : first + MAX_BLOCKS]
        parent = event.keys[first - 1] if first else event.parent
        start = TOKEN_BYTES * self._page_size * first
        tokens = event.tokens[start : start + TOKEN_BYTES * self._page_size * len(keys)]
        return {
            "block_hashes": list(map(self._hash, keys)),
            "parent_block_hash": self._hash(parent) if event.position or first else None,
            "token_ids": array("I", tokens).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIA[event.where],
            "lora_name": None,
        }

    def _shaped(self, kind: str, fields: _Fields) -> object:
        return {"type": kind, **fields} if self._is_map else [kind, *fields.values()]


def last_64_bits(digest: bytes) -> int:
    """Shortens a block's hash as vLLM does (`maybe_convert_block_hash`,
    v1/core/kv_cache_utils.py).
    """
    return int.from_bytes(digest[-8:], "big")
