"""The kinds of layers: what each keeps of a sequence, where, and what it needs in order to resume.

A model is a tuple of kinds. Each is asked in turn until all agree on a position. A new kind is one
more class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from milepost.cache.placement import MAX_ROUNDED_OFF, Mode
from milepost.cache.tree.path import Path

Where = Literal["slot", "page", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Facts about all layers of one kind together. Bytes are those of one rank."""

    grid: int = 1
    """A prefill can keep this kind's states at multiples of this."""
    where: Where = "none"
    """Where a state is stored: in a slot, beside each page, or nowhere."""
    state_bytes: int = 0
    page_bytes: int = 0
    """Bytes of a page's KV and of the state stored beside it."""
    window: int = 0
    """Number of tokens that a sliding window reads, the newest included; 0 without a window."""

    def longest_usable(self, path: Path, limit: int) -> int:
        """Returns the largest position up to `limit` at which layers of this kind can resume; 0 is
        always possible."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(LayerKind):
    """Needs the KV of every token before it, from resident pages or a checkpoint's tail page."""

    def longest_usable(self, path: Path, limit: int) -> int:
        if limit <= path.kv_length:
            return limit
        checkpoint = path.deepest_on(path.end, limit) if path.end is not None else None
        return max(path.kv_length, checkpoint.position if checkpoint else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(LayerKind):
    """Needs a state after exactly that many tokens, from a slot. The default grid is the chunk size
    of the Gated DeltaNet and KDA kernels."""

    grid: int = 64
    where: Where = "slot"

    def longest_usable(self, path: Path, limit: int) -> int:
        checkpoint = path.deepest_checkpoint(limit)
        return checkpoint.position if checkpoint else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Recurrent):
    """Attention to the last `window` tokens. Their KV is part of the state, in pages of their own
    (`allocation/windows.py`), and can be kept anywhere."""

    grid: int = 1
    window: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(LayerKind):
    """A state of a few rows, stored beside each page as of the page's end. So every page boundary
    can be resumed. Its grid is a page."""

    where: Where = "page"

    def longest_usable(self, path: Path, limit: int) -> int:
        limit = min(limit, path.kv_length)
        return limit - limit % path.chain.page_size


HYBRID: tuple[LayerKind, ...] = (FullAttention(), Recurrent())
"""Full attention and Gated DeltaNet, of any sizes."""


def longest_usable(kinds: Sequence[LayerKind], path: Path, limit: int) -> int:
    """Lowers the limit until every kind of layer can resume there, and returns it."""
    while True:
        lowered = limit
        for kind in kinds:
            lowered = kind.longest_usable(path, lowered)
        if lowered == limit:
            return limit
        limit = lowered


def grid_of(kinds: Sequence[LayerKind]) -> int:
    """Returns the grid on which a prefill can keep the states of every kind."""
    return lcm(*(kind.grid for kind in kinds))


def window_of(kinds: Sequence[LayerKind]) -> int:
    """Returns the longest sliding window in tokens; 0 if there is none."""
    return max(kind.window for kind in kinds)


def window_pages(window: int, page_size: int) -> int:
    """Returns the largest number of pages that one state needs: those of the last `window - 1`
    tokens."""
    return (window + page_size - 3) // page_size + 1 if window > 1 else 0


def num_window_pages(
    window: int, page_size: int, *, num_states: int, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Returns the largest number of window pages needed at once. They are those of every state,
    including running requests'; the pages that two steps in flight write; a page begun per request
    and step; and one more per request, since its window reaches one token further than a state's.
    """
    if not window:
        return 0
    under_way = 2 * -(-max_num_batched_tokens // page_size) + 3 * max_num_seqs
    return num_states * window_pages(window, page_size) + under_way


@dataclass(slots=True, kw_only=True)
class CacheConfig:
    """Configuration of a cache: tokens per page, kinds of layers, mode, the grid of all kinds. A
    `bitwise` cache shares only what prefills leave on the grid."""

    page_size: int
    kinds: tuple[LayerKind, ...]
    mode: Mode
    block_size: int
    grid: int
    bitwise: bool
    max_rounded_off: float = field(init=False)
    enabled: bool = field(init=False)
    slots_each: int = field(init=False)
    """Number of slots per running request: 0 in models without states in slots."""
    window: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_rounded_off = 1.0 if self.bitwise else MAX_ROUNDED_OFF
        self.enabled = self.mode != "none"
        self.slots_each = int(any(kind.where == "slot" for kind in self.kinds))
        self.window = window_of(self.kinds)
        are_beside = any(kind.where == "page" for kind in self.kinds)
        assert not (self.window and are_beside), "what lies beside pages goes with no state"
