"""The kinds of layers: what each keeps of a sequence, and where. That decides at which positions a
model can resume (`Finder`, matching.py). A model is a tuple of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from milepost.cache.placement import MAX_ROUNDED_OFF, Mode

Where = Literal["slot", "page", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Facts about all layers of one kind together."""

    grid: int = 1
    """A prefill can keep this kind's states at multiples of this."""
    where: Where = "none"
    """Where a state is stored: in a slot, beside each page, or nowhere."""
    window: int = 0
    """Number of tokens that a sliding window reads, the newest included; 0 without a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(LayerKind):
    """Needs the KV of every token before it, from resident pages or a checkpoint's tail page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(LayerKind):
    """Needs a state after exactly that many tokens, from a slot. The default grid is the chunk size
    of the Gated DeltaNet and KDA kernels."""

    grid: int = 64
    where: Where = "slot"


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


HYBRID: tuple[LayerKind, ...] = (FullAttention(), Recurrent())
"""Full attention and Gated DeltaNet, of any sizes."""


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
    resume_step: int = field(init=False)
    """A model with states beside pages resumes at the ends of pages only, others at any token."""
    window: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_rounded_off = 1.0 if self.bitwise else MAX_ROUNDED_OFF
        self.enabled = self.mode != "none"
        self.slots_each = int(any(kind.where == "slot" for kind in self.kinds))
        self.window = window_of(self.kinds)
        are_beside = any(kind.where == "page" for kind in self.kinds)
        self.resume_step = self.page_size if are_beside else 1
        assert not (self.window and are_beside), "what lies beside pages goes with no state"
