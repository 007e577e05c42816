"""Events of the cache, in the order in which they happened: for tiers, which keep what is evicted,
and for routers, which send a prompt to where it hits.

A page is *reachable* while there is a checkpoint at or after its end: a resume can use it then. In
a model without states in slots every page is reachable. From the events a listener knows what is
cached, and what a prompt would hit: the deepest state on its path. Nothing is recorded until
somebody listens.

Events can be sent as bytes. Their `tokens` are contents (`tree/chain.py`): token ids as packed
little-endian uint32, and a record before the tokens of a picture.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from milepost.cache.plans import What

Where = Literal["device", "host", "disk"]
"""The memory that holds a state. The cache's own events are about the device; a tier may send the
same events for host memory and disk."""


class PagesCached(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A run of full pages was cached, with its KV."""

    keys: tuple[bytes, ...]
    parent: bytes
    """Key of the page before the first, or of the root, which stands for model and salt."""
    tokens: bytes
    position: int
    """Number of tokens before the first page."""
    ids: tuple[int, ...]
    is_salted: bool


class StateCached(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A checkpoint was made: the state after `position` tokens."""

    key: bytes
    parent: bytes
    """Key of its last full page, or of the root. Equal to `key` if there is no tail."""
    tokens: bytes
    """The content of its tail, after that page."""
    position: int
    id: int
    tail_page: int | None
    kind: str


class PagesReachable(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False
):
    """A run of cached pages became reachable; its `parent` is a root or reachable too."""

    keys: tuple[bytes, ...]
    parent: bytes
    tokens: bytes
    position: int
    is_salted: bool
    where: Where = "device"
    """The memory that holds the checkpoint. The pages may be elsewhere."""


class PagesUnreachable(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False
):
    """A run of pages, from the deepest upwards, can no longer be reached by checkpoints in `where`.
    The pages may still be cached."""

    keys: tuple[bytes, ...]
    where: Where = "device"


class Departure(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """Something that was cached was evicted from a page or slot, which may be overwritten from now
    on."""

    key: bytes
    parent: bytes
    tokens: bytes
    """The content of the page, or of the tail."""
    position: int
    """Number of tokens up to its end."""
    what: What
    id: int
    score: float
    """Number of tokens that it was expected to save."""
    num_moves: int
    """How many of the next plan's page moves come before this event. To keep the contents, copy
    them after those moves and before anything else is written."""
    windows: tuple[int, ...] = ()
    """Sliding-window pages that are freed with a state's slot."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """The cache was reset. Nothing is cached any more, and no contents are worth keeping."""


Event = PagesCached | StateCached | PagesReachable | PagesUnreachable | Departure | Cleared
