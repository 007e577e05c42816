"""Events of the cache, in the order in which they became true: for tiers that keep what leaves, and
for routers that send a prompt to where it hits.

A page is *reachable* while a checkpoint at or after its end is there: a resume can use it then. In
a model without states in slots every page is. A listener knows from the events what is cached, and
what a prompt would hit: the deepest state on its path. Nothing is recorded until somebody listens.

Events can be sent as bytes. Their `tokens` are contents (`tree/chain.py`): token ids as packed
little-endian uint32, and a record before the tokens of a picture.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from milepost.cache.plans import What

Where = Literal["device", "host", "disk"]
"""A memory that states are in. Events of the cache are of the device's; who keeps states in others
may tell the same of those.
"""


class PagesCached(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A run of full pages has its KV."""

    keys: tuple[bytes, ...]
    parent: bytes
    """The key of the page before the first, or of the root, which stands for model and salt."""
    tokens: bytes
    position: int
    """Tokens before the first."""
    ids: tuple[int, ...]
    is_salted: bool


class StateCached(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A checkpoint was made: `position` tokens with their state."""

    key: bytes
    parent: bytes
    """The key of its last full page, or of the root. Without a tail its own key is the same."""
    tokens: bytes
    """Its tail, past that page."""
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
    """Where the checkpoint is. The pages may be elsewhere."""


class PagesUnreachable(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False
):
    """A run of pages became unreachable by checkpoints there, the first page last; they may still
    be cached.
    """

    keys: tuple[bytes, ...]
    where: Where = "device"


class Departure(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """Something that was cached leaves a page or slot, which may be written from now on."""

    key: bytes
    parent: bytes
    tokens: bytes
    """The page's, or the tail."""
    position: int
    """Tokens up to its end."""
    what: What
    id: int
    score: float
    """Tokens that it was expected to save."""
    num_moves: int
    """Number of the next plan's page moves that come first. Who wants the contents copies them
    after those moves, and before anything else is written.
    """
    windows: tuple[int, ...] = ()
    """Pages of windows that a state leaves with its slot."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """Nothing is cached any more, and no contents are worth keeping."""


Event = PagesCached | StateCached | PagesReachable | PagesUnreachable | Departure | Cleared
