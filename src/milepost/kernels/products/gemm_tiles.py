"""Tiles of GEMMs of quantised weights on any chip, dense or experts'. Needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.forms.matrix import Matrix
from milepost.kernels.products.forms.quantised import BLOCK, Fp8

FEW = Tiles(block_m=16, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
SOME, MORE = replace(FEW, block_m=32), replace(FEW, block_m=64)
MANY = replace(FEW, block_m=128, num_warps=8)
OF_TENSOR_MEMORY = {MORE: replace(MORE, num_warps=8), MANY: replace(MANY, block_n=64)}
"""Tiles on sm_100, where a step's products come from tensor memory to be scaled: with the others a
thread spills 650 to 1,200 bytes, with these none."""
_FOUR_BITS = (
    Tiles(block_m=8, block_n=64, block_k=BLOCK, num_warps=4, num_stages=4),
    Tiles(block_m=16, block_n=64, block_k=BLOCK, num_warps=4, num_stages=4),
    Tiles(block_m=32, block_n=64, block_k=BLOCK, num_warps=4, num_stages=4),
    Tiles(block_m=64, block_n=64, block_k=BLOCK, num_warps=4, num_stages=3),
)
"""A tile of weights has 64 outputs: more of them would need more registers for sums than unpacking
leaves."""
_LEAST_FIXED = 16
"""Rows of a tile from which on products of all tiles have the same bits: chips multiply fewer with
other instructions, and AMD's slowly."""
_MOST_GATED = 32
"""Rows of a tile with a sum of gates and one of ups, at most, where registers hold all operands."""


def choose_gemm(num_rows: float, weight: Matrix, chip: Chip, *, is_gated: bool = False) -> Tiles:
    """Returns the tiles of a quantised GEMM with this many rows for a weight."""
    if weight.form is Fp8:
        return _least((FEW, SOME, MORE, MANY), num_rows)
    least = _LEAST_FIXED if weight.batch_invariant or chip.is_amd else 0
    most = _MOST_GATED if is_gated and not chip.has_wide_mma else MORE.block_m
    return _least([each for each in _FOUR_BITS if least <= each.block_m <= most], num_rows)


def _least(choices: Sequence[Tiles], num_rows: float) -> Tiles:
    """Returns the first tiles with so many rows, or the last."""
    return next((each for each in choices if num_rows <= each.block_m), choices[-1])
