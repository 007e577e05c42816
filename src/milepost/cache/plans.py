"""Orders to the runner: exports, copies, moves, arrivals. All can be sent as bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from milepost.cache.placement import Kind

What = Literal["page", "tail", "state"]
"""A full page, the page of a checkpoint's last tokens, or a slot."""


class PageMove(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copy the KV of page `source` to page `target`, in every layer: what is cached there stands in
    the target from now on, and the source may be overwritten.
    """

    source: int
    target: int


class PageCopy(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copy the KV of the first `num_tokens` tokens of page `source` to page `target`, in every
    layer.
    """

    source: int
    target: int
    num_tokens: int


class Export(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Write the state after exactly `position` tokens to `slot`."""

    position: int
    slot: int
    kind: Kind


HOLE = -1
"""Stands in a table of windows' pages for one that is older than the window, and is not held."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Something that is to be filled from outside: by its key, to where."""

    key: bytes
    what: What
    id: int
    windows: tuple[int, ...] = ()
    """Pages of windows that a state needs besides its slot."""
