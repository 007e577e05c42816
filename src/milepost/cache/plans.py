"""Instructions to the runner: exports, copies, moves, arrivals. All can be sent as bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from milepost.cache.placement import Kind

What = Literal["page", "tail", "state"]
"""A full page, a checkpoint's tail page, or the state in a slot."""


class PageMove(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copies the KV of page `source` to page `target`, in every layer. What is cached there is in
    the target from then on, and the source may be overwritten."""

    source: int
    target: int


class PageCopy(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copies the KV of the first `num_tokens` tokens of page `source` to page `target`, in every
    layer."""

    source: int
    target: int
    num_tokens: int


class Export(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Writes the state after exactly `position` tokens to `slot`."""

    position: int
    slot: int
    kind: Kind


HOLE = -1
"""Entry in a table of window pages for a page that is older than the window and is not held."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A page or slot to be filled from outside: what belongs there, and its key."""

    key: bytes
    what: What
    id: int
    windows: tuple[int, ...] = ()
    """Window pages that a state needs besides its slot."""
