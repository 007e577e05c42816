"""How the portable attention kernels are compiled, by head size, type and chip.

Legend: R query rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from milepost.kernels.attention.tiles import NARROW_ROWS, WIDE_ROWS
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import next_power_of_2

_CROWD = 1.25
"""Narrow programs for each SM, from which on they are many."""


class WideTiles:
    """Tiles of prefills and of shared pages, of heads."""


class NarrowTiles:
    """Tiles of decodes, of heads."""


class LatentTiles:
    """Tiles of latents."""


class AttentionTile(NamedTuple):
    """All of a launch that decides which kernel serves it."""

    rows: int
    is_wide: bool
    """Tiles of prefills and of shared pages; else of decodes."""
    head_dim: int
    """Entries of a key: of latents, all of them."""
    dtype: torch.dtype = torch.bfloat16
    """Type of the queries."""
    has_fp8_pages: bool = False
    page_size: int = 64
    fits_tma: bool = True
    """Whether TMA can count the pool's rows."""
    num_programs: int = 0
    """Narrow tiles times KV heads of the launch."""
    is_latent: bool = False
    is_windowed: bool = False
    """Whether tokens attend to the last ones alone."""

    @property
    def form(self) -> type[Any]:
        return LatentTiles if self.is_latent else WideTiles if self.is_wide else NarrowTiles

    def count(self, unit: str) -> float:  # noqa: ARG002
        return self.rows

    def why_not(self, kernel: object) -> str:  # noqa: ARG002
        return ""


class KVTiles(NamedTuple):
    """How a portable kernel is compiled: KV positions of a block, warps, and stages of the loops
    over blocks without and with a mask."""

    block: int
    num_warps: int
    num_stages: int
    tail_stages: int = 1

    def shared_bytes(self, rows: int, head_dim: int) -> int:
        """Upper bound of a program's shared memory in 16-bit types: its queries and the blocks of
        KV that are under way."""
        blocks = max(self.num_stages - 1, self.tail_stages + 1) + 0.5
        return int((rows + blocks * self.block) * head_dim * 2)


_TESTED = KVTiles(16, 4, 1, 1)
"""For float32, whose products are unrolled multiplications, slow to compile."""
_CROWDED = (KVTiles(64, 4, 2, 2), KVTiles(32, 4, 2, 2))
"""Several share an SM, and hide each other's waits."""
_NARROW_LARGE = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
"""A page is looked up two blocks before its KV is loaded, and that two before it is used."""
_NARROW = (KVTiles(128, 4, 5, 2), KVTiles(64, 4, 4, 2), KVTiles(64, 4, 2, 2))
_HALF = (KVTiles(64, 4, 3, 2), KVTiles(32, 4, 3, 2), KVTiles(16, 4, 2, 2))
_HALF_UNPACKED = (KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
"""For large heads in FP8 that is unpacked without instructions: over four warps it spills."""
_WIDE_LARGE = (KVTiles(64, 8, 3, 2), KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
_WIDE = (KVTiles(128, 8, 3, 2), KVTiles(64, 8, 3, 2), KVTiles(32, 8, 2, 2))
_LATENT = (KVTiles(64, 8, 2), KVTiles(32, 8, 2), KVTiles(16, 8, 2), KVTiles(16, 4, 1))


def cut(tile: AttentionTile, chip: Chip) -> KVTiles:
    """Returns the first of the measured tiles that fits the chip: the best on an H200
    (bench/kernels/attention.py), then ever smaller ones."""
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
    """Returns the first of the tiles that fits the chip."""
    if tile.dtype == torch.float32:
        return _LATENT[-1]
    row_bytes = 2 * tile.head_dim

    def fits(tiles: KVTiles) -> bool:
        held = tile.rows * (row_bytes + 2 * tiles.block)
        held += tiles.num_stages * tiles.block * row_bytes
        return held <= chip.shared_bytes and not (chip.is_amd and tiles.num_stages > 1)

    return next(filter(fits, _LATENT), _LATENT[-1])
