"""The kernels of attention: `ATTENTION` is the table, and `choose` alone decides which kernel
serves a tile; `heads_served` and `latents_served` list its choices for `milepost kernels`. Nothing
here needs a GPU, or Triton.

A tile's KV is read in blocks, one after the other ("64 seq"); "wgmma" and "lanes" say that a
block's own terms are added another way than by the portable kernel. A result is a sum over the
*splits* of its KV, which begin at multiples of 128 positions; how many there are depends on what
else the step holds, so a token's bits may depend on the tokens beside it.

Legend: R query rows of a tile: tokens x query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from milepost.kernels.attention.portable.tiles import (
    AttentionTile,
    LatentTiles,
    NarrowTiles,
    WideTiles,
    cut,
    cut_latents,
)
from milepost.kernels.attention.tiles import NARROW_ROWS, WIDE_ROWS, ItemShapes
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import HOPPER, KernelChoice, KernelTable, row
from milepost.kernels.platform.tensors import next_power_of_2

MOST_CAPTURED_TOKENS = 3072
"""Largest number of tokens of any captured step."""
CAPTURED_TOKENS = 512
"""Largest number of tokens of a captured step: a graph must not depend on a step's pages, so it
does not dequantise them first."""
COPIED_BYTES, _ALL = 256 << 20, 1 << 30
"""Largest number of bytes of the 16-bit copy of a layer's FP8 pages where no kernel needs it, and a
number of pages that no step exceeds, where Hopper's does. A prefill of 32,000 tokens is 12 % slower
without a copy; a 27B's other activations take more memory than the copy of 65,536 tokens."""
HOPPER_BLOCK = 64
"""Number of KV positions in a block of Hopper's kernels."""
MAX_NARROW_ROWS = 64
_SMALL_HEAD = 128
_FP8_BESIDE = 3
"""Number of narrow items that share an SM if pages are FP8: blocks take half the room and half the
time to arrive, so another program hides the work between two blocks."""
_HOPPER_NARROW_ROWS = 16
"""Largest number of query rows that fit the registers of Hopper's kernel for FP8 pages."""
_HOPPER_NARROW = {"num_beside": 2, "narrow_waves": 4}
_LATENT_ROWS, _LATENT_UNIT = 64, 32
"""Rows of a wide item of latents, few because a row's sums take as many registers as a latent has
entries, and least KV of a narrow item, little because a token's many heads keep a program busy."""
_LATENT_SHARED = 160 << 10
"""Bytes of shared memory that wide tiles of latents need; large entries need room for their rows
and the smallest block."""
_LEAST_BLOCK = 16
_PORTABLE, _IN_BLOCKS = "attention.portable.attend", "{tiles.block} seq"


def choose(tile: AttentionTile, chip: Chip) -> KernelChoice[AttentionTile]:
    """Returns the kernel that serves the tile on the chip."""
    choice = ATTENTION.choose(tile, chip)
    assert choice is not None, "the portable kernel serves all tiles"
    return choice


# --- how tokens become tiles ----------------------------------------------------------------------


def shape_heads(
    group: int, head_dim: int, chip: Chip, *, tokens_each: int, has_fp8_kv: bool, dequantises: bool
) -> ItemShapes:
    """Returns the sizes of items for `group` query heads per KV head. Most decodes have
    `tokens_each` tokens; wide items read FP8 pages as they are unless the step `dequantises`
    them."""
    rows = narrow_rows(group, tokens_each)
    takes_apart = has_fp8_kv and not dequantises and chip.unpacks_fp8
    wide = wide_rows(head_dim, chip.shared_bytes, takes_apart=takes_apart)
    if not has_fp8_kv:
        return ItemShapes(narrow_rows=rows, wide_rows=wide)
    few = narrow_rows(group, tokens_each, NARROW_ROWS // 2)
    tile = AttentionTile(rows=few, is_wide=False, head_dim=head_dim, has_fp8_pages=True)
    if rows <= NARROW_ROWS and choose(tile, chip).kernel.is_hopper:
        return ItemShapes(narrow_rows=few, wide_rows=wide, **_HOPPER_NARROW)
    return ItemShapes(narrow_rows=rows, wide_rows=wide, num_beside=_FP8_BESIDE)


def most_copied(
    num_kv_heads: int, head_dim: int, page_size: int, num_tokens: int, chip: Chip
) -> int:
    """Returns the most FP8 pages that wide items may read as a 16-bit copy, in a step of up to
    `num_tokens` tokens. Hopper's kernel needs a copy of all pages. The portable kernel decodes a
    block once for every tile that reads it; a copy saves that, and has a limit so that long
    sequences take little memory. A limit makes launches depend on the step's pages, so no graph may
    hold such a step."""
    tile = AttentionTile(rows=WIDE_ROWS, is_wide=True, head_dim=head_dim, page_size=page_size)
    if choose(tile, chip).kernel.is_hopper:
        return _ALL if num_tokens > CAPTURED_TOKENS else 0
    page_bytes = 2 * page_size * num_kv_heads * head_dim * torch.bfloat16.itemsize
    return COPIED_BYTES // page_bytes if num_tokens > MOST_CAPTURED_TOKENS else 0


def shape_latents(num_heads: int, width: int, chip: Chip, *, value_bytes: int) -> ItemShapes:
    """Returns the sizes of items for latents of `width` entries; all heads of a token are rows."""
    one_token = max(NARROW_ROWS, next_power_of_2(num_heads))
    held = (_LATENT_ROWS + _LEAST_BLOCK) * width * value_bytes
    has_room = chip.shared_bytes >= max(_LATENT_SHARED, held)
    # From 64 rows on Blackwell's matrix units take over, which need far more shared memory.
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
    """Returns the number of rows of narrow items, at least `least`, if most sequences have
    `tokens_each` tokens; a sequence's tokens read their KV together."""
    rows = next_power_of_2(group * tokens_each)
    return max(rows, least) if rows <= MAX_NARROW_ROWS else NARROW_ROWS


def wide_rows(head_dim: int, shared_bytes: int, *, takes_apart: bool = False) -> int:
    """Returns the number of rows of wide items, whose queries take up to half of a program's shared
    memory. Large heads get fewer rows where FP8 is unpacked without instructions for it, for want
    of registers."""
    fit = shared_bytes // 2 >= WIDE_ROWS * head_dim * 2
    crowded = takes_apart and head_dim > _SMALL_HEAD
    return WIDE_ROWS if fit and not crowded else WIDE_ROWS // 2


# --- the table ------------------------------------------------------------------------------------

_WINDOW = "a sliding window", lambda tile, _: not tile.is_windowed
_TMA = (
    ("queries are not of 16 bits", lambda tile, _: tile.dtype in (torch.bfloat16, torch.float16)),
    ("more rows than TMA counts", lambda tile, _: tile.fits_tma),
)
ATTENTION = KernelTable[AttentionTile](
    row(
        "wide, Hopper",
        "attention.hopper.wide",
        (WideTiles,),
        f"{HOPPER_BLOCK} seq, wgmma",
        (f"tiles are not of {WIDE_ROWS} rows", lambda tile, _: tile.rows == WIDE_ROWS),
        ("FP8 pages", lambda tile, _: not tile.has_fp8_pages),
        ("heads are not of 128 or 256", lambda tile, _: tile.head_dim in (128, 256)),
        (f"pages below {HOPPER_BLOCK}", lambda tile, _: tile.page_size >= HOPPER_BLOCK),
        _WINDOW,
        *_TMA,
        needs=HOPPER,
        entry="attend",
    ),
    row(
        "fp8 narrow, Hopper",
        "attention.hopper.narrow",
        (NarrowTiles,),
        f"{HOPPER_BLOCK} seq, lanes",
        (
            f"tiles are of more than {_HOPPER_NARROW_ROWS} rows",
            lambda tile, _: tile.rows <= _HOPPER_NARROW_ROWS,
        ),
        ("pages are not FP8", lambda tile, _: tile.has_fp8_pages),
        ("heads are not of 256", lambda tile, _: tile.head_dim == 256),
        _WINDOW,
        *_TMA,
        needs=HOPPER,
        entry="attend",
    ),
    row("tiles", _PORTABLE, (WideTiles, NarrowTiles), _IN_BLOCKS, cut=cut, entry="attend"),
    row("latents", _PORTABLE, (LatentTiles,), _IN_BLOCKS, cut=cut_latents, entry="attend"),
)


class Served(NamedTuple):
    """Numbers of tokens per sequence that one kernel serves."""

    pages: str
    tokens: str
    kernel: str
    order: str
    refused: str
    """Why the kernel before it in the table does not serve them."""


def heads_served(
    group: int, head_dim: int, dtype: torch.dtype, chip: Chip, *, is_windowed: bool = False
) -> Iterator[Served]:
    """Yields which kernels attend for `group` query heads of a KV head, by pages and tokens; in a
    sliding window FP8 pages are read as they are."""
    for is_fp8 in (False, True):
        shapes = shape_heads(
            group, head_dim, chip, tokens_each=1, has_fp8_kv=is_fp8, dequantises=False
        )
        tile = AttentionTile(
            rows=shapes.narrow_rows,
            is_wide=False,
            head_dim=head_dim,
            dtype=dtype,
            has_fp8_pages=is_fp8,
            is_windowed=is_windowed,
        )
        most = shapes.narrow_rows // group
        wide = tile._replace(rows=shapes.wide_rows, is_wide=True)
        pages = "FP8 pages" if is_fp8 else f"{dtype.itemsize * 8}-bit pages"
        yield _served(pages, f"1 to {most}" if most > 1 else "1", tile, chip)
        if not is_fp8 or is_windowed:
            yield _served(pages, f"from {most + 1}", wide, chip)
            continue
        made = shape_heads(group, head_dim, chip, tokens_each=1, has_fp8_kv=True, dequantises=True)
        copied = wide._replace(rows=made.wide_rows, has_fp8_pages=False)
        is_hopper = choose(copied, chip).kernel.is_hopper
        last = CAPTURED_TOKENS if is_hopper else MOST_CAPTURED_TOKENS
        yield _served(pages, f"{most + 1} to {last}", wide, chip)
        yield _served(f"{pages}, made 16-bit first", f"from {last + 1}", copied, chip)


def latents_served(num_heads: int, width: int, dtype: torch.dtype, chip: Chip) -> Iterator[Served]:
    """Yields which kernels attend to latents of `width` entries, by tokens."""
    shapes = shape_latents(num_heads, width, chip, value_bytes=dtype.itemsize)
    tile = AttentionTile(
        rows=shapes.narrow_rows, is_wide=False, head_dim=width, dtype=dtype, is_latent=True
    )
    yield _served("any pages", "1", tile, chip)
    yield _served("any pages", "from 2", tile._replace(rows=shapes.wide_rows), chip)


def _served(pages: str, tokens: str, tile: AttentionTile, chip: Chip) -> Served:
    choice = choose(tile, chip)
    refused = [f"{kernel.name}: {reason}" for kernel, reason in ATTENTION.refusals(tile, chip)]
    return Served(
        pages=pages,
        tokens=f"{tokens} a sequence",
        kernel=choice.kernel.name,
        order=choice.order,
        refused=refused[-1] if refused else "",
    )
