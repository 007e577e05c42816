"""Triton: what kernels of routed experts have in common.

An expert's `up` is [2 * I, H], the gates' rows before the ups', or [I, H] if it squares a ReLU;
`down` is [H, I]. One kernel makes both projections: the up projection reads tokens' rows and
activates, the down projection reads what that made and has routing weights.

Legend: P routed tokens, I an expert's size, H hidden size, M rows of a block, N outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.portable.gemm_step import input_scales, operands


class ExpertWeight(NamedTuple):
    """A stack of matrices; what a form does not have is None."""

    numbers: Any
    scales: Any = None
    zeros: Any = None
    """Zero points, or factors of e2m1 rows."""
    input_scales: Any = None
    """Scales of all activations, set by the checkpoint."""

    @staticmethod
    def of(weight: Raw | Quantised, chip: Chip) -> ExpertWeight:
        if isinstance(weight, Raw):
            return ExpertWeight(weight.values)
        return ExpertWeight(*operands(weight, chip), input_scales(weight))


class RowGroups(NamedTuple):
    """`grouping.Groups` as kernels take them; `order` is None if routed tokens are not grouped, and
    `blocks` are their experts then."""

    order: Any
    blocks: Any
    num_blocks: Any = None


class RowBase(NamedTuple):
    """Rows as kernels take them, and their scales [D, rows], or None."""

    base: Any
    scales: Any


class UpShape(NamedTuple):
    """The up projection and its tiles; a constant on the device."""

    top_k: int
    inputs: int
    size: int
    is_gated: bool
    block_n: int
    block_k: int
    is_bfloat: bool
    is_native: bool
    """Whether the chip knows float8."""


@triton.jit
def find_block(groups, capacity, block):
    """Returns a block's expert (negative for padding), its first row and the end of the expert's
    rows; a routed token that is not grouped is a block."""
    expert = tl.load(groups.blocks + block).to(tl.int64)
    if groups.order is None:
        return expert, block, block + 1
    else:
        first_row = tl.load(groups.blocks + capacity + block)
        end = tl.load(groups.blocks + 2 * capacity + block)
        return expert, first_row, end


@triton.jit
def load_routed(order, o_m, is_row):
    """Loads the rows' routed tokens, 0 beyond the last."""
    if order is None:
        return tl.where(is_row, o_m, 0)
    else:
        return tl.load(order + o_m, mask=is_row, other=0)


@triton.jit
def find_scales(
    weight,
    expert,
    row,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
):
    """Returns pointers to the scales and zero points of `row` [N] of an expert, which has HEIGHT of
    them; a form without zero points has any pointer for them."""
    first_scale = expert * ((HEIGHT + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    p_scale = weight.scales + first_scale + row // SCALE_ROWS * DEPTHS
    p_zero = p_scale
    if weight.zeros is not None:
        p_zero = weight.zeros + (expert * HEIGHT + row) * (DEPTHS if GROUP > 0 else 1)
    return p_scale, p_zero
