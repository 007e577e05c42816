"""How products of one row are cut up on any chip, dense ones and experts'. Needs no Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.products.forms import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import Fp4, Int4
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
_FOUR_BIT_INPUTS, _FOUR_BIT_OUTPUTS, _FEW_INPUTS = 1024, 4, 256
"""Inputs of a step of four bits and outputs of a program, at most; and inputs of a step of experts'
last projections. Whole steps compute nothing beyond the last input."""
_WARP_WEIGHTS = 1024
"""Weights in four bits that a warp loads at once. Where no thread loads more in a step, scales stay
in the threads that loaded them."""
_MOST_AHEAD, _MOST_WEIGHTS_AHEAD = 10, 1 << 26
"""Most steps whose weights there are registers for, and weights of a matrix from which on programs
hide each other's waits."""


def cut_gemv(product: Product, chip: Chip) -> GemvTiles:  # noqa: ARG001
    """Cuts the product of one row."""
    weight, is_gated = product.weight, product.epilogue is Epilogue.GATED
    if weight.form is not Raw:
        if weight.form in (Int4, Fp4):
            return _cut_four_bits(weight, 1 + is_gated)
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
    if mixture.form in (Int4, Fp4):
        tiles = _cut_expert_in_four_bits
        return tiles(up, is_up=True), tiles(down, is_up=False)
    if mixture.form is not Raw:
        up_tiles = _cut_quantised_row(up, _WEIGHTS, 1 + mixture.is_gated)
        return up_tiles, _cut_quantised_row(down, _FEW_WEIGHTS)
    block_n, depth = (8, 512) if down.num_inputs <= _SMALL_EXPERT else (2, 2048)
    return _cut_raw_gates(up), GemvTiles(block_n, depth, num_warps=4)


def _cut_raw_gates(weight: Matrix) -> GemvTiles:
    """Cuts gate and up projections, which a program reads side by side."""
    return GemvTiles(4, 2048 if weight.num_inputs <= 2048 else 1024, num_warps=4)


def _cut_four_bits(weight: Matrix, num_matrices: int = 1) -> GemvTiles:
    """Cuts `num_matrices` in four bits that a program multiplies the same row by."""
    block_k = math.gcd(weight.num_inputs, _FOUR_BIT_INPUTS)
    num_warps = max(1, _FOUR_BIT_OUTPUTS * block_k // _WARP_WEIGHTS)
    steps = num_matrices * weight.num_inputs // block_k
    is_ahead = steps <= _MOST_AHEAD and weight.num_weights < _MOST_WEIGHTS_AHEAD
    return GemvTiles(num_warps * _WARP_WEIGHTS // block_k, block_k, num_warps, is_ahead=is_ahead)


def _cut_expert_in_four_bits(weight: Matrix, *, is_up: bool) -> GemvTiles:
    """Cuts an expert's projection. Not all of its weights are loaded first: other experts' programs
    hide what one waits for."""
    block_k = math.gcd(weight.num_inputs, 2 * _FOUR_BIT_INPUTS if is_up else _FEW_INPUTS)
    block_n = max(_FOUR_BIT_OUTPUTS, 4 * _WARP_WEIGHTS // block_k)
    return GemvTiles(block_n, block_k, num_warps=4)


def _cut_quantised_row(weight: Matrix, num_weights: int, num_matrices: int = 1) -> GemvTiles:
    """Cuts `num_matrices` that a program multiplies the same row by."""
    block_k = min(next_power_of_2(weight.num_inputs), _GEMV_INPUTS)
    return GemvTiles(num_weights // (num_matrices * block_k), block_k, num_warps=8)
