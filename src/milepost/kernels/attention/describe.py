"""Describes which kernels attend for a model, by pages and tokens, for `milepost kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from milepost.kernels.attention.portable.tiles import AttentionTile
from milepost.kernels.attention.table import (
    ATTENTION,
    CAPTURED_TOKENS,
    MOST_CAPTURED_TOKENS,
    choose,
    shape_heads,
    shape_latents,
)
from milepost.kernels.platform.device import Chip


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
