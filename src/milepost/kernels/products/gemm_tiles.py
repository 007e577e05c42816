"""Tiles of GEMMs of quantised weights on any chip, dense or experts'. Needs no Triton."""

from __future__ import annotations

from dataclasses import replace

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.forms.matrix import Matrix
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Int8

FEW = Tiles(block_m=16, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
SOME, MORE = replace(FEW, block_m=32), replace(FEW, block_m=64)
MANY = replace(FEW, block_m=128, num_warps=8)
OF_TENSOR_MEMORY = {MORE: replace(MORE, num_warps=8), MANY: replace(MANY, block_n=64)}
"""Tiles on sm_100, where a step's products come from tensor memory to be scaled: with the others a
thread spills 650 to 1,200 bytes, with these none."""


def _tiles(block_m: int, block_n: int, num_warps: int, num_stages: int = 4) -> Tiles:
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        block_k=BLOCK,
        num_warps=num_warps,
        num_stages=num_stages,
        is_swapped=True,
    )


_EIGHT, _SIXTEEN, _THIRTY_TWO = _tiles(8, 128, 8), _tiles(16, 128, 8), _tiles(32, 64, 4)
_SIXTY_FOUR, _SIXTY_FOUR_SPLIT = _tiles(64, 64, 4, 3), _tiles(64, 128, 8, 3)
"""Tiles of four bits by their rows; the last are of weights that are cut along their inputs."""
_SPLIT_OUTPUTS = 4096
"""Most outputs of those."""
_FEW_EXPERT = _tiles(8, 64, 4), _tiles(8, 128, 4)
"""Tiles of both projections of experts with few rows."""
_FEW_EACH = 6
"""Rows of an expert on average, at most, whose tiles have eight: of more rows it would take two."""


def choose_gemm(num_rows: float, weight: Matrix, chip: Chip) -> Tiles:
    """Returns the tiles of a quantised GEMM with this many rows."""
    if weight.form in (Fp8, Int8):
        return next((each for each in (FEW, SOME, MORE) if num_rows <= each.block_m), MANY)
    if num_rows <= _most_in_eights(weight, chip):
        return _EIGHT
    if num_rows <= _THIRTY_TWO.block_m:
        return _SIXTEEN if num_rows <= _SIXTEEN.block_m else _THIRTY_TWO
    return _SIXTY_FOUR_SPLIT if weight.num_outputs <= _SPLIT_OUTPUTS else _SIXTY_FOUR


def choose_experts(rows_each: float, weight: Matrix, chip: Chip) -> tuple[Tiles, Tiles]:
    """Returns the tiles of both projections of experts in four bits, with this many rows each."""
    if rows_each > _FEW_EACH:
        return _THIRTY_TWO, _THIRTY_TWO
    if not _most_in_eights(weight, chip):
        return replace(_SIXTEEN, block_n=64, num_warps=4), _SIXTEEN
    return _FEW_EXPERT


def _most_in_eights(weight: Matrix, chip: Chip) -> int:
    """Returns how many rows are multiplied by eights. Hopper multiplies them by other instructions
    than more, so with other bits, and 16 in two tiles are faster than in one; AMD's units do not
    have so few."""
    if weight.batch_invariant or chip.is_amd:
        return 0
    return 16 if chip.has_wide_mma else 8
