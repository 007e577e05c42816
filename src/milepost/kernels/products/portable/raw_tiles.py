"""How products of few rows with raw weights are cut up on every chip.

The time is that of reading the weight once. One with few outputs is also cut along its inputs, so
that every SM reads some of it.

Legend: I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import Tiles, choose_split_k

FEW_ROWS = Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, is_swapped=True)
_FEW_LONG_ROWS = Tiles(
    block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=5, is_swapped=True
)
_LONG = 4096
"""Inputs from which on another stage pays."""
_MORE_ROWS = Tiles(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=4)
FEW_OUTPUTS = 1024
"""Up to so many outputs torch's GEMM leaves most SMs idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTiles:
    """Tiles, and parts along the inputs."""

    tiles: Tiles
    split_k: int


def cut(num_rows: int, shape: tuple[int, int], chip: Chip, *, is_precise: bool) -> SplitTiles:
    """Of a product with a weight of this shape, [O, I]; where it `is_precise` another stage was not
    measured."""
    tiles = _MORE_ROWS
    if num_rows <= FEW_ROWS.block_m:
        is_long = shape[1] >= _LONG and not is_precise
        tiles = _FEW_LONG_ROWS if is_long else FEW_ROWS
    tiles = tiles.fitted(chip)
    split_k = choose_split_k(*shape, tiles, chip.num_sms)
    return SplitTiles(tiles=tiles, split_k=split_k)
