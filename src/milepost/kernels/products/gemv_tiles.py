"""Tiles of products of one row, dense or experts'. Needs no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import next_power_of_2
from milepost.kernels.products.forms.matrix import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import Fp8, Int8
from milepost.kernels.products.tiles import FEW_OUTPUTS

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


NARROW = GemvTiles(block_n=32, block_k=FEW_INPUTS, num_warps=4)
_GEMV_INPUTS = 2048
"""Inputs of a step, at most."""
_SMALL, _SMALL_EXPERT = 1 << 24, 1024
"""Fewest weights of a matrix that is not small, and the largest size of a small expert."""
_WEIGHTS, _FEW_WEIGHTS, _FOUR_BIT_WEIGHTS = 1 << 15, 1 << 14, 1 << 13
"""Quantised weights that a program reads at a time. The more, the less it matters that each rounds
its row; small matrices, and experts' last projections, need more programs. Rows are not rounded for
four bits, and more programs share the work of unpacking."""


def cut_gemv(product: Product, chip: Chip) -> GemvTiles:  # noqa: ARG001
    """Cuts the product of one row."""
    weight = product.weight
    if weight.form is not Raw:
        is_small = weight.num_weights < _SMALL
        return _cut_quantised_row(weight, _FEW_WEIGHTS if is_small else _WEIGHTS)
    if product.epilogue is Epilogue.FLOAT32:
        block_n = 1 if weight.num_outputs <= FEW_OUTPUTS else 4
        return GemvTiles(block_n=block_n, block_k=2048, num_warps=8)
    if weight.num_inputs <= FEW_INPUTS:
        return NARROW
    if weight.num_inputs > 2048:
        return GemvTiles(block_n=2, block_k=2048, num_warps=4)
    if weight.num_outputs >= _MANY_OUTPUTS:
        return GemvTiles(block_n=4, block_k=1024, num_warps=4)
    return GemvTiles(block_n=4, block_k=2048, num_warps=8)


def cut_expert_gemv(mixture: Mixture) -> tuple[GemvTiles, GemvTiles]:
    """Cuts both projections of experts, row by row."""
    up, down = mixture.weights
    if mixture.form is not Raw:
        up_tiles = _cut_quantised_row(up, _WEIGHTS, 1 + mixture.is_gated)
        return up_tiles, _cut_quantised_row(down, _FEW_WEIGHTS)
    block_k = 2048 if up.num_inputs <= 2048 else 1024
    is_small = down.num_inputs <= _SMALL_EXPERT
    block_n, depth = (8, 512) if is_small else (2, 2048)
    return (
        GemvTiles(block_n=4, block_k=block_k, num_warps=4),
        GemvTiles(block_n=block_n, block_k=depth, num_warps=4),
    )


def _cut_quantised_row(weight: Matrix, num_weights: int, num_matrices: int = 1) -> GemvTiles:
    """Cuts `num_matrices` that a program multiplies the same row by."""
    block_k = min(next_power_of_2(weight.num_inputs), _GEMV_INPUTS)
    has_bytes = weight.form in (Fp8, Int8)
    num_weights = num_weights if has_bytes else _FOUR_BIT_WEIGHTS
    block_n = num_weights // (num_matrices * block_k)
    return GemvTiles(block_n=block_n, block_k=block_k, num_warps=8 if has_bytes else 4)
