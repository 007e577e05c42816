"""The kernels of attention: `KERNELS` is the table, and `choose` the only place that decides which
kernel serves a tile. Nothing here needs a GPU, or Triton.

A tile's KV is read in blocks, one after the other ("64 seq"); "wgmma" and "lanes" say that a
block's own terms are added another way than by the portable kernel. A result is a sum over the
*splits* of its KV, which begin at multiples of 128 positions; how many there are depends on what
else the step holds, so a token's bits may depend on the tokens beside it.

Legend: R query rows of a tile: tokens x query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from milepost.kernels.attention.items import NARROW_ROWS, WIDE_ROWS, ItemShapes
from milepost.kernels.attention.portable.tiles import AttentionTile, cut, cut_latents
from milepost.kernels.attention.tiles import UNIT
from milepost.kernels.platform.device import Chip, why_no_gluon
from milepost.kernels.platform.tiles import next_power_of_2

SPLITS = f"at multiples of {UNIT}, by load"
CAPTURED_TOKENS = 512
"""Most tokens of a captured step: a graph must not depend on a step's pages, so it does not
dequantise them first."""
HOPPER = "sm_90"
HOPPER_BLOCK = 64
"""KV positions of a block of Hopper's kernels."""
MAX_NARROW_ROWS = 64
_SMALL_HEAD = 128
_FP8_BESIDE = 3
"""Narrow items that share an SM if pages are FP8: blocks take half the room and half the time to
arrive, so another program hides what one does between two blocks."""
_HOPPER_NARROW_ROWS = 16
"""More queries do not fit the registers of Hopper's kernel for FP8 pages."""
_HOPPER_NARROW = {"num_beside": 2, "narrow_waves": 4}
_LATENT_ROWS, _LATENT_UNIT = 64, 32
"""Wide rows of latents: sums of a row take as many registers as a latent is wide. And the least KV
of a narrow item: a token's heads are many rows, which keep a program busy even with little KV."""
_LATENT_SHARED = 160 << 10
"""Shared memory from which on wide tiles of latents fit; large entries need room for their rows and
the least block."""
_LEAST_BLOCK = 16


# --- what is asked, and what is answered ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A row of the table."""

    name: str
    module: str
    """Under `milepost.kernels`."""
    tiles: str
    """The tiles that it takes, for people."""
    needs: str = ""
    refuses: Callable[[AttentionTile], str]
    """Why the kernel does not serve a tile; empty if it does."""
    cut: Callable[[AttentionTile, Chip], Any] = lambda _tile, _chip: None
    order: str

    @property
    def is_hopper(self) -> bool:
        return self.needs == HOPPER

    def why_not(self, tile: AttentionTile, chip: Chip) -> str:
        """Why another kernel serves the tile; empty if this one may."""
        reason = why_no_gluon(chip) if self.is_hopper else ""
        return reason or self.refuses(tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The kernel that serves a tile, and how it is compiled."""

    kernel: AttentionKernel
    tiles: Any

    @property
    def order(self) -> str:
        """Order in which a row's KV is added up within a split."""
        return self.kernel.order.format(tiles=self.tiles)


def choose(tile: AttentionTile, chip: Chip) -> AttentionChoice:
    """The first kernel of the table that serves the tile on the chip."""
    return _choose(tile, chip, why_no_gluon(chip))


@lru_cache(maxsize=1 << 10)
def _choose(tile: AttentionTile, chip: Chip, reason: str) -> AttentionChoice:  # noqa: ARG001
    kernel = next(kernel for kernel in KERNELS if not kernel.why_not(tile, chip))
    return AttentionChoice(kernel=kernel, tiles=kernel.cut(tile, chip))


def refusals(tile: AttentionTile, chip: Chip) -> Iterator[tuple[AttentionKernel, str]]:
    """The kernels for such tiles ahead of the one that serves this, and why they do not."""
    for kernel in KERNELS:
        reason = kernel.why_not(tile, chip)
        if not reason:
            return
        if tile.is_latent == (kernel is LATENT) and tile.is_wide is not (kernel is NARROW_HOPPER):
            yield kernel, reason


# --- how tokens become tiles ----------------------------------------------------------------------


def shape_heads(
    group: int, head_dim: int, chip: Chip, *, tokens_each: int, has_fp8_kv: bool, dequantises: bool
) -> ItemShapes:
    """Items for `group` query heads of a KV head; most decodes have `tokens_each` tokens, and wide
    items read FP8 pages as they are unless the step `dequantises` them."""
    rows = narrow_rows(group, tokens_each)
    takes_apart = has_fp8_kv and not dequantises and chip.unpacks_fp8
    wide = wide_rows(head_dim, chip.shared_bytes, takes_apart=takes_apart)
    if not has_fp8_kv:
        return ItemShapes(narrow_rows=rows, wide_rows=wide)
    few = narrow_rows(group, tokens_each, NARROW_ROWS // 2)
    tile = AttentionTile(rows=few, is_wide=False, head_dim=head_dim, has_fp8_pages=True)
    if rows <= NARROW_ROWS and choose(tile, chip).kernel is NARROW_HOPPER:
        return ItemShapes(narrow_rows=few, wide_rows=wide, **_HOPPER_NARROW)
    return ItemShapes(narrow_rows=rows, wide_rows=wide, num_beside=_FP8_BESIDE)


def shape_latents(num_heads: int, width: int, chip: Chip, *, value_bytes: int) -> ItemShapes:
    """Items for latents of `width` entries; all heads of a token are rows."""
    one_token = max(NARROW_ROWS, next_power_of_2(num_heads))
    held = (_LATENT_ROWS + _LEAST_BLOCK) * width * value_bytes
    has_room = chip.shared_bytes >= max(_LATENT_SHARED, held)
    # From 64 rows on Blackwell's matrix units take over, which want far more shared memory.
    is_large = has_room and chip.capability[0] != 10
    wide = _LATENT_ROWS if is_large else one_token
    return ItemShapes(narrow_rows=one_token, narrow_unit=_LATENT_UNIT, wide_rows=wide)


def why_no_latents(num_heads: int, latent_dim: int) -> str:
    """Why no kernel attends to such latents; empty if one does."""
    if num_heads > _LATENT_ROWS:
        return f"the fused ones have up to {_LATENT_ROWS} heads, not {num_heads}"
    if latent_dim > 512:
        return f"the fused ones have latents up to 512, not {latent_dim}"
    return ""


def narrow_rows(group: int, tokens_each: int, least: int = NARROW_ROWS) -> int:
    """Rows of narrow items if most sequences have `tokens_each` tokens, which then read their KV
    together; at least `least`."""
    rows = next_power_of_2(group * tokens_each)
    return max(rows, least) if rows <= MAX_NARROW_ROWS else NARROW_ROWS


def wide_rows(head_dim: int, shared_bytes: int, *, takes_apart: bool = False) -> int:
    """Rows of wide items: queries take up to half of a program's shared memory. Unpacking FP8
    without instructions for it leaves large heads no registers for as many rows."""
    fit = shared_bytes // 2 >= WIDE_ROWS * head_dim * 2
    crowded = takes_apart and head_dim > _SMALL_HEAD
    return WIDE_ROWS if fit and not crowded else WIDE_ROWS // 2


# --- what a kernel refuses, and how it is compiled ------------------------------------------------


def _unless_16_bits(tile: AttentionTile) -> str:
    if tile.is_latent:
        return "latents"
    if tile.dtype not in (torch.bfloat16, torch.float16):
        return "queries are not of 16 bits"
    return "" if tile.fits_tma else "more rows than TMA counts"


def _refuses_wide(tile: AttentionTile) -> str:
    if not tile.is_wide or tile.rows != WIDE_ROWS:
        return f"tiles of {tile.rows} rows, not {WIDE_ROWS}"
    if tile.has_fp8_pages:
        return "FP8 pages"
    if tile.head_dim not in (128, 256):
        return f"heads of {tile.head_dim}"
    return f"pages of {tile.page_size}" if tile.page_size < HOPPER_BLOCK else _unless_16_bits(tile)


def _refuses_narrow(tile: AttentionTile) -> str:
    if tile.is_wide or tile.rows > _HOPPER_NARROW_ROWS:
        return f"tiles of {tile.rows} rows, more than {_HOPPER_NARROW_ROWS}"
    if not tile.has_fp8_pages:
        return "pages are not FP8"
    return f"heads of {tile.head_dim}" if tile.head_dim != 256 else _unless_16_bits(tile)


WIDE_HOPPER = AttentionKernel(
    name="wide, Hopper",
    module="attention.hopper.wide",
    tiles="128 rows, heads of 128 or 256, 16-bit pages of at least 64",
    needs=HOPPER,
    refuses=_refuses_wide,
    order=f"{HOPPER_BLOCK} seq, wgmma",
)
NARROW_HOPPER = AttentionKernel(
    name="fp8 narrow, Hopper",
    module="attention.hopper.narrow",
    tiles="up to 16 rows, heads of 256, FP8 pages",
    needs=HOPPER,
    refuses=_refuses_narrow,
    order=f"{HOPPER_BLOCK} seq, lanes",
)
PORTABLE = AttentionKernel(
    name="tiles",
    module="attention.portable.attend",
    tiles="any heads and pages",
    refuses=lambda tile: "latents" if tile.is_latent else "",
    cut=cut,
    order="{tiles.block} seq",
)
LATENT = AttentionKernel(
    name="latents",
    module="attention.portable.latent",
    tiles="latents",
    refuses=lambda tile: "" if tile.is_latent else "heads",
    cut=cut_latents,
    order="{tiles.block} seq",
)
KERNELS = WIDE_HOPPER, NARROW_HOPPER, PORTABLE, LATENT
