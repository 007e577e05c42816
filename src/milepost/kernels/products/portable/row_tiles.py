"""Tiles of products of one row, dense ones and experts', and of raw weights with more rows, on any
chip. Needs no Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.products.forms import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import Fp4, Fp8, Int4
from milepost.kernels.products.portable.tiles import (
    FEW_OUTPUTS,
    SplitTiles,
    choose_split_k,
    make_tiles,
)

if TYPE_CHECKING:
    from milepost.kernels.products.expert_table import Mixture
    from milepost.kernels.products.table import Product

_NARROW_INPUTS = 128
"""Largest number of inputs of a raw GEMV that narrow programs take in one step."""
_MANY_OUTPUTS = 4096
"""Fewest outputs that programs with half as many threads read faster."""


class GemvTiles(NamedTuple):
    """Tiles of a matrix-vector product: outputs of a program and inputs of a step."""

    block_n: int
    block_k: int
    num_warps: int
    is_ahead: bool = False
    """Whether all weights are loaded before the first are multiplied."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a kernel is compiled for."""
        return {"block_n": self.block_n, "block_k": self.block_k, "is_ahead": self.is_ahead}


_NARROW = GemvTiles(block_n=32, block_k=_NARROW_INPUTS, num_warps=4)
_GEMV_INPUTS = 2048
"""Largest number of inputs of a step."""
_SMALL, _SMALL_EXPERT = 1 << 24, 1024
"""Fewest weights of a large matrix, and the largest size of a small expert."""
_WEIGHTS, _FEW_WEIGHTS = 1 << 15, 1 << 14
"""Eight-bit weights that a program reads at a time. Every program rounds its row, so fewer programs
are better; small matrices, and experts' down projections, need more of them."""
_FP8_GATES, _FP8_EXPERT_GATES = GemvTiles(8, 1024, 4), GemvTiles(16, 512, 4)
"""Tiles of large gate and up projections in FP8."""
_FOUR_BIT_INPUTS, _FOUR_BIT_OUTPUTS, _EXPERT_OUTPUTS = 1024, 4, 8
"""Inputs of a warp's step in four bits, at most, and outputs of a program, of experts' last
projections more: a thread multiplies its part of the row by all of these."""
_MOST_WARPS, _LEAST_WARPS = 4, 8
"""Largest number of warps of a program in four bits; and the fewest warps of an SM: below, programs
get more warps or fewer outputs."""
_MOST_AHEAD, _MOST_WEIGHTS_AHEAD = 40 * 8, 1 << 26
"""Largest number of weights in four bits of a thread that there are registers for, and weights of a
matrix from which on programs hide each other's waits."""


def cut_gemv(product: Product, chip: Chip) -> GemvTiles:
    """Returns the tiles of a product of one row."""
    weight, is_gated = product.weight, product.epilogue is Epilogue.GATED
    if weight.form is not Raw:
        if weight.form in (Int4, Fp4):
            return _cut_four_bits(weight, chip.num_sms, 1 + is_gated)
        if is_gated and weight.form is Fp8 and weight.num_weights >= _SMALL:
            return _FP8_GATES
        num_weights = _FEW_WEIGHTS if weight.num_weights < _SMALL else _WEIGHTS
        return _cut_quantised_row(weight, num_weights, 1 + is_gated)
    if is_gated:
        return _cut_raw_gates(weight)
    if product.epilogue is Epilogue.FLOAT32:
        block_n = 1 if weight.num_outputs <= FEW_OUTPUTS else 4
        return GemvTiles(block_n, 2048, num_warps=8)
    if weight.num_inputs <= _NARROW_INPUTS:
        return _NARROW
    if weight.num_inputs > 2048:
        return GemvTiles(2, 2048, num_warps=4)
    if weight.num_outputs >= _MANY_OUTPUTS:
        return GemvTiles(4, 1024, num_warps=4)
    return GemvTiles(4, 2048, num_warps=8)


def cut_expert_gemv(mixture: Mixture) -> tuple[GemvTiles, GemvTiles]:
    """Returns the tiles of both projections of experts that are multiplied row by row."""
    up, down = mixture.weights
    if mixture.form in (Int4, Fp4):
        tiles = _cut_expert_in_four_bits
        return tiles(up, is_up=True), tiles(down, is_up=False)
    if mixture.form is not Raw:
        up_tiles = _cut_quantised_row(up, _WEIGHTS, 1 + mixture.is_gated)
        if mixture.form is Fp8 and mixture.is_gated:
            up_tiles = _FP8_EXPERT_GATES
        return up_tiles, _cut_quantised_row(down, _FEW_WEIGHTS)
    block_n, depth = (8, 512) if down.num_inputs <= _SMALL_EXPERT else (2, 2048)
    return _cut_raw_gates(up), GemvTiles(block_n, depth, num_warps=4)


def _cut_raw_gates(weight: Matrix) -> GemvTiles:
    """Returns the tiles of gate and up projections, which a program reads together."""
    return GemvTiles(4, 2048 if weight.num_inputs <= 2048 else 1024, num_warps=4)


def _cut_four_bits(weight: Matrix, num_sms: int, num_matrices: int) -> GemvTiles:
    """Returns the tiles of `num_matrices` four-bit matrices that a program multiplies by the same
    row."""
    num_outputs, num_inputs = weight.num_outputs // num_matrices, weight.num_inputs
    block_n, block_k, num_warps = _FOUR_BIT_OUTPUTS, _warp_inputs(num_inputs), 1
    least = _LEAST_WARPS * num_sms
    while num_outputs * num_warps < least * block_n:
        if num_warps < _MOST_WARPS and num_inputs % (2 * block_k) == 0:
            block_k, num_warps = 2 * block_k, 2 * num_warps
        elif block_n > 1:
            block_n //= 2
        else:
            break
    held = num_matrices * block_n * num_inputs // (32 * num_warps)
    is_ahead = held <= _MOST_AHEAD and weight.num_weights < _MOST_WEIGHTS_AHEAD
    return GemvTiles(block_n, block_k, num_warps, is_ahead=is_ahead)


def _warp_inputs(num_inputs: int) -> int:
    """Returns the inputs of a warp's step: half of the most if these are whole then, or enough."""
    half = _FOUR_BIT_INPUTS // 2
    is_half = num_inputs % _FOUR_BIT_INPUTS and (num_inputs % half == 0 or num_inputs < half)
    return half if is_half else _FOUR_BIT_INPUTS


def _cut_expert_in_four_bits(weight: Matrix, *, is_up: bool) -> GemvTiles:
    """Returns the tiles of an expert's four-bit projection. Its weights are not all loaded first,
    because other experts' programs hide the wait."""
    block_n = _FOUR_BIT_OUTPUTS if is_up else _EXPERT_OUTPUTS
    return GemvTiles(block_n, _warp_inputs(weight.num_inputs), num_warps=1)


def _cut_quantised_row(weight: Matrix, num_weights: int, num_matrices: int = 1) -> GemvTiles:
    """Returns the tiles of `num_matrices` matrices that a program multiplies by the same row."""
    block_k = min(next_power_of_2(weight.num_inputs), _GEMV_INPUTS)
    return GemvTiles(num_weights // (num_matrices * block_k), block_k, num_warps=8)


# --- raw weights ---------------------------------------------------------------------------------

_FEW_ROWS, _MORE_ROWS = make_tiles(16, 64), make_tiles(64, 32, is_swapped=False)
FEW_ROWS = _FEW_ROWS.block_m
_LONG = 4096
"""Fewest inputs for which few rows gain from one more stage."""


def cut_raw(product: Product, chip: Chip) -> SplitTiles:
    """Returns the tiles of a few rows times raw weights. Float32 outputs were measured with the
    usual number of stages only."""
    weight, tiles = product.weight, _MORE_ROWS
    if product.num_rows <= FEW_ROWS:
        is_long = weight.num_inputs >= _LONG and product.epilogue is not Epilogue.FLOAT32
        tiles = replace(_FEW_ROWS, num_stages=5) if is_long else _FEW_ROWS
    tiles = tiles.fitted(chip)
    split_k = choose_split_k(weight.num_outputs, weight.num_inputs, tiles, chip.num_sms)
    return SplitTiles(tiles=tiles, split_k=split_k)


_INVARIANT = make_tiles(64, 64, block_k=64, is_swapped=False)
"""Tiles of raw weights in one order for any number of rows: larger tiles return the same sums,
other instructions may not."""
_INVARIANT_MANY = replace(_INVARIANT, block_m=128, block_n=128, num_warps=8)


def cut_raw_invariant(product: Product, chip: Chip) -> SplitTiles:
    """Returns the tiles of raw weights in one order for any number of rows. Few rows get narrow
    tiles, one for every SM."""
    num_rows, num_outputs, tiles = product.num_rows, product.weight.num_outputs, _INVARIANT
    if num_rows > _INVARIANT_MANY.block_m and num_outputs > FEW_OUTPUTS:
        tiles = _INVARIANT_MANY
    elif num_rows <= _INVARIANT.block_m:
        block_n = 1 << max(4, (num_outputs // chip.num_sms).bit_length() - 1)
        tiles = replace(_INVARIANT, block_n=min(block_n, _INVARIANT.block_n))
    return SplitTiles(tiles=tiles.fitted(chip), split_k=1)
