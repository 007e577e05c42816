"""Tiles of the portable attention kernels, by head size, dtype and chip.

Legend: R query rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from milepost.kernels.attention.tiles import NARROW_ROWS, WIDE_ROWS
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import next_power_of_2

_CROWD = 1.25
"""Fewest narrow programs per SM that count as many."""


class WideTiles:
    """Tiles of prefills and of shared pages, of heads."""


class NarrowTiles:
    """Tiles of decodes, of heads."""


class LatentTiles:
    """Tiles of latents."""


class AttentionTile(NamedTuple):
    """The properties of a launch that decide which kernel serves it."""

    rows: int
    is_wide: bool
    """Whether items are those of prefills and of shared pages, not of decodes."""
    head_dim: int
    """Number of entries of a key; of a latent, all of its entries."""
    dtype: torch.dtype = torch.bfloat16
    """Type of the queries."""
    has_fp8_pages: bool = False
    page_size: int = 64
    fits_tma: bool = True
    """Whether TMA can count the pool's rows."""
    num_programs: int = 0
    """Number of narrow tiles of the launch times KV heads."""
    is_latent: bool = False
    is_windowed: bool = False
    """Whether tokens attend to a sliding window."""

    @property
    def form(self) -> type[Any]:
        return LatentTiles if self.is_latent else WideTiles if self.is_wide else NarrowTiles

    def count(self, unit: str) -> int:  # noqa: ARG002
        return self.rows

    def why_not(self, kernel: object) -> str:  # noqa: ARG002
        return ""


class KVTiles(NamedTuple):
    """Sizes that a portable kernel is compiled for: KV positions of a block, warps, and stages of
    the loops over blocks without and with a mask."""

    block: int
    num_warps: int
    num_stages: int
    tail_stages: int = 1

    def shared_bytes(self, rows: int, head_dim: int) -> int:
        """Returns an upper bound in bytes of a program's shared memory with 16-bit types: its
        queries and the KV blocks that are in flight."""
        blocks = max(self.num_stages - 1, self.tail_stages + 1) + 0.5
        return int((rows + blocks * self.block) * head_dim * 2)


_TESTED = KVTiles(16, 4, 1, 1)
"""Tiles for float32, whose products are unrolled multiplications and slow to compile."""
_CROWDED = (KVTiles(64, 4, 2, 2), KVTiles(32, 4, 2, 2))
"""Tiles of many narrow programs: several share an SM and hide each other's waits."""
_NARROW_LARGE = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
"""Tiles with five stages: a page is looked up two blocks before its KV is loaded, and KV is loaded
two blocks before it is used."""
_NARROW = (KVTiles(128, 4, 5, 2), KVTiles(64, 4, 4, 2), KVTiles(64, 4, 2, 2))
_HALF = (KVTiles(64, 4, 3, 2), KVTiles(32, 4, 3, 2), KVTiles(16, 4, 2, 2))
_HALF_UNPACKED = (KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
"""Tiles for large heads in FP8 that is unpacked without instructions for it, which spills with four
warps."""
_WIDE_LARGE = (KVTiles(64, 8, 3, 2), KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
_WIDE = (KVTiles(128, 8, 3, 2), KVTiles(64, 8, 3, 2), KVTiles(32, 8, 2, 2))
_LATENT = (KVTiles(64, 8, 2), KVTiles(32, 8, 2), KVTiles(16, 8, 2), KVTiles(16, 4, 1))


def cut(tile: AttentionTile, chip: Chip) -> KVTiles:
    """Returns the first of the measured tiles that fits the chip; the best on an H200 come first
    (bench/kernels/attention.py), then smaller ones."""
    if tile.dtype == torch.float32:
        return _TESTED
    block_e = max(16, next_power_of_2(tile.head_dim))
    candidates = _candidates(tile, chip)

    rows, room = max(tile.rows, NARROW_ROWS), chip.shared_bytes
    fitting = (tiles for tiles in candidates if tiles.shared_bytes(rows, block_e) <= room)
    tiles = next(fitting, candidates[-1])
    stages = chip.choose_stages(tiles.num_stages, tiles.block * block_e * 2)
    return tiles._replace(num_stages=stages)


def _candidates(tile: AttentionTile, chip: Chip) -> tuple[KVTiles, ...]:
    is_large, unpacks = tile.head_dim > 128, tile.has_fp8_pages and chip.unpacks_fp8
    if tile.rows <= 2 * NARROW_ROWS:
        if tile.has_fp8_pages:
            return _NARROW_LARGE
        are_many = tile.num_programs > _CROWD * chip.num_sms
        return _CROWDED if is_large and are_many else _NARROW_LARGE if is_large else _NARROW
    if tile.rows < WIDE_ROWS:
        return _HALF_UNPACKED if is_large and unpacks else _HALF
    if is_large:
        return _WIDE_LARGE
    return _WIDE[1:] if unpacks else _WIDE


def cut_latents(tile: AttentionTile, chip: Chip) -> KVTiles:
    """Returns the first of the tiles of latents that fits the chip."""
    if tile.dtype == torch.float32:
        return _LATENT[-1]
    row_bytes = 2 * tile.head_dim

    def fits(tiles: KVTiles) -> bool:
        held = tile.rows * (row_bytes + 2 * tiles.block)
        held += tiles.num_stages * tiles.block * row_bytes
        return held <= chip.shared_bytes and not (chip.is_amd and tiles.num_stages > 1)

    return next(filter(fits, _LATENT), _LATENT[-1])
