"""How products of one row are cut up on any chip, dense ones and experts'. Needs no Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import next_power_of_2
from milepost.kernels.products.forms.matrix import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Int8
from milepost.kernels.products.portable.tiles import FEW_OUTPUTS

if TYPE_CHECKING:
    from milepost.kernels.products.expert_table import Mixture
    from milepost.kernels.products.table import Product

FEW_INPUTS = 128
"""Inputs that a raw GEMV takes in one step of narrow programs."""
_MANY_OUTPUTS = 4096
"""Outputs from which on programs with half as many threads read faster."""


class GemvTiles(NamedTuple):
    """Outputs of a program and inputs of a step."""

    block_n: int
    block_k: int
    num_warps: int
    is_ahead: bool = False
    """Whether all weights are loaded before the first are multiplied."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a kernel is compiled for."""
        return {"block_n": self.block_n, "block_k": self.block_k, "is_ahead": self.is_ahead}


NARROW = GemvTiles(block_n=32, block_k=FEW_INPUTS, num_warps=4)
_GEMV_INPUTS = 2048
"""Inputs of a step, at most."""
_SMALL, _SMALL_EXPERT = 1 << 24, 1024
"""Fewest weights of a matrix that is not small, and the largest size of a small expert."""
_WEIGHTS, _FEW_WEIGHTS = 1 << 15, 1 << 14
"""Weights of eight bits that a program reads at a time. Each program rounds its row, so few are
better; small matrices, and experts' last projections, need more."""
_FOUR_BIT_INPUTS, _FOUR_BIT_WEIGHTS = 512, 1 << 12
"""Inputs of a step of four bits, at most, and its weights: what each thread loads at once. Whole
steps compute nothing beyond the last input, and scales stay where they are loaded."""
_LEAST_STEPS, _MOST_AHEAD = 2, 10
"""Fewest steps of a program, which has more outputs otherwise; and most whose weights there are
registers for."""


def cut_gemv(product: Product, chip: Chip) -> GemvTiles:  # noqa: ARG001
    """Cuts the product of one row."""
    weight, is_gated = product.weight, product.epilogue is Epilogue.GATED
    if weight.form is not Raw:
        num_weights = _FEW_WEIGHTS if weight.num_weights < _SMALL else _WEIGHTS
        return _cut_quantised_row(weight, num_weights, 1 + is_gated)
    if is_gated:
        return _cut_raw_gates(weight)
    if product.epilogue is Epilogue.FLOAT32:
        block_n = 1 if weight.num_outputs <= FEW_OUTPUTS else 4
        return GemvTiles(block_n, 2048, num_warps=8)
    if weight.num_inputs <= FEW_INPUTS:
        return NARROW
    if weight.num_inputs > 2048:
        return GemvTiles(2, 2048, num_warps=4)
    if weight.num_outputs >= _MANY_OUTPUTS:
        return GemvTiles(4, 1024, num_warps=4)
    return GemvTiles(4, 2048, num_warps=8)


def cut_expert_gemv(mixture: Mixture) -> tuple[GemvTiles, GemvTiles]:
    """Cuts both projections of experts, row by row."""
    up, down = mixture.weights
    if mixture.form is not Raw:
        up_tiles = _cut_quantised_row(up, _WEIGHTS, 1 + mixture.is_gated)
        return up_tiles, _cut_quantised_row(down, _FEW_WEIGHTS)
    block_n, depth = (8, 512) if down.num_inputs <= _SMALL_EXPERT else (2, 2048)
    return _cut_raw_gates(up), GemvTiles(block_n, depth, num_warps=4)


def _cut_raw_gates(weight: Matrix) -> GemvTiles:
    """Cuts gate and up projections, which a program reads side by side."""
    return GemvTiles(4, 2048 if weight.num_inputs <= 2048 else 1024, num_warps=4)


def _cut_quantised_row(weight: Matrix, num_weights: int, num_matrices: int = 1) -> GemvTiles:
    """Cuts `num_matrices` that a program multiplies the same row by."""
    if weight.form not in (Fp8, Int8):
        block_k = math.gcd(weight.num_inputs, _FOUR_BIT_INPUTS)
        while block_k > BLOCK and weight.num_inputs < _LEAST_STEPS * block_k:
            block_k //= 2
        is_ahead = num_matrices * weight.num_inputs <= _MOST_AHEAD * block_k
        return GemvTiles(_FOUR_BIT_WEIGHTS // block_k, block_k, num_warps=4, is_ahead=is_ahead)
    block_k = min(next_power_of_2(weight.num_inputs), _GEMV_INPUTS)
    return GemvTiles(num_weights // (num_matrices * block_k), block_k, num_warps=8)
