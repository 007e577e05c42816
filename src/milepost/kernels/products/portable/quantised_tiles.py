"""Which quantised weights our kernels take, and with which tiles.

Legend: T tokens, I inputs.
"""

from __future__ import annotations

from dataclasses import replace

from milepost.kernels.layout.emit import Activations
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.forms.quantised import BLOCK, Quantised

FEW = Tiles(block_m=16, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
SOME = Tiles(block_m=32, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
MORE = Tiles(block_m=64, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
MANY = Tiles(block_m=128, block_n=128, block_k=BLOCK, num_warps=8, num_stages=4)
_REGIMES = (FEW, SOME, MORE)
_OF_TENSOR_MEMORY = {MORE: replace(MORE, num_warps=8), MANY: replace(MANY, block_n=64)}
"""On sm_100 a step's products come from tensor memory to be scaled: with the other tiles a thread
of a GEMM spills 650 to 1,200 bytes there, with these none."""
_FOUR_BIT_WARPS = 8
"""Numbers of four bits take work in registers, which is spread over more threads."""


def suits(rows: Activations, *weights: Quantised) -> bool:
    """16-bit activations with contiguous rows, and whole blocks of inputs."""
    is_whole = all(weight.num_inputs % BLOCK == 0 for weight in weights)
    are_contiguous = rows.values is None or rows.values.stride(-1) == 1
    return rows.dtype.itemsize == 2 and are_contiguous and is_whole


def choose(num_rows: float, *, is_fp8: bool) -> Tiles:
    tiles = next((tiles for tiles in _REGIMES if num_rows <= tiles.block_m), MANY)
    if is_fp8 or tiles == MANY:
        return tiles
    return replace(tiles, num_warps=_FOUR_BIT_WARPS)


def choose_dense(num_rows: int, chip: Chip, *, is_fp8: bool) -> Tiles:
    tiles = choose(num_rows, is_fp8=is_fp8)
    if chip.capability[0] == 10:
        tiles = _OF_TENSOR_MEMORY.get(tiles, tiles)
    return tiles.fitted(chip)
