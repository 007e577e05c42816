"""Triton: weights of every form as the portable kernels take them.

A product's sizes, its tiles and its form are one constant, `ProductShape`. A form's tensors are
`WeightTensors`. Experts are a stack of matrices; gate rows stand before up rows in each. A dense
weight is its only expert.

Legend: N outputs of a program, K inputs of a step, G groups of inputs, M rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import (
    BLOCK,
    FP4_LANE,
    Fp4,
    Fp8,
    Int4,
    Int8,
    Quantised,
)
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.kernels.products.portable.rounding import readable


class WeightTensors(NamedTuple):
    """A weight's tensors on the device; those that its form does not have are None."""

    numbers: Any
    scales: Any = None
    zeros: Any = None
    """Zero points of Int4, or factors of e2m1 rows."""
    input_scales: Any = None
    """Scales of all activations, if the checkpoint has them, or their factor."""

    @staticmethod
    def of(weight: Raw | Quantised, chip: Chip) -> WeightTensors:
        if isinstance(weight, Raw):
            return WeightTensors(weight.values)
        if isinstance(weight, Int4):
            return WeightTensors(weight.packed, weight.scales, weight.zeros)
        if isinstance(weight, Fp4):
            inputs = weight.input_factor if isinstance(weight, W4A4) else None
            scales = weight.scales.view(torch.uint8)
            return WeightTensors(weight.packed, scales, weight.factors, inputs)
        values = weight.values if isinstance(weight, Int8) else readable(weight.values, chip)
        return WeightTensors(values, weight.scales, None, weight.input_scale)


class ProductShape(NamedTuple):
    """A product, its tiles and the form of its weight; a constant on the device."""

    inputs: int
    outputs: int
    """Outputs of a row, after the activation if it is gated."""
    block_n: int
    block_k: int
    block_m: int = 1
    steps: int = 1
    """See `Tiles`."""
    split_k: int = 1
    top_k: int = 1
    """Routed tokens that share a row of inputs."""
    is_gated: bool = False
    limit: float = 0.0
    """See `RoutedRows.limit`."""
    is_swapped: bool = False
    """Whether the weight is the left operand, and sums are [N, M]."""
    group: int = 0
    """Inputs that share a scale in four bits, negated for e2m1; 0 for raw and eight-bit weights."""
    depths: int = 0
    """Number of scales of an output."""
    scale_rows: int = 1
    """Number of outputs that share a scale."""
    has_block_scales: bool = False
    is_native: bool = True
    """Whether the chip multiplies FP8; for that form alone."""
    is_decoded: bool = False
    """Whether FP8 weights are converted to the rows' type, because the chip rounds no rows to
    FP8."""
    is_static: bool = False
    """Whether the checkpoint has a scale of all activations."""
    is_rounded: bool = False
    """Whether rows were rounded before and have scales, or were added up and have sums."""
    scales_first: bool = False
    """See `Tiles`."""
    is_ahead: bool = False
    """Whether all weights of a row's program are loaded before the first are multiplied."""
    has_ptx: bool = False
    """Whether four-bit weights are unpacked by NVIDIA's instructions."""

    @staticmethod
    def of(
        weight: Raw | Quantised, chip: Chip, *, is_gated: bool = False, **tiles: Any
    ) -> ProductShape:
        outputs = weight.num_outputs // (1 + is_gated)
        shape = ProductShape(weight.num_inputs, outputs, is_gated=is_gated, **tiles)
        if isinstance(weight, Raw):
            return shape
        depths = weight.scales.shape[-1]
        if isinstance(weight, Int8):
            is_static = weight.input_scale is not None
            return shape._replace(depths=1, is_static=is_static, is_swapped=True)
        if not isinstance(weight, Fp8):
            group = weight.group if isinstance(weight, Int4) else -weight.group
            return shape._replace(
                group=group,
                depths=depths,
                is_swapped=shape.is_swapped or not shape.scales_first,
                # A step has several small groups, whose sums would be as many as their weights.
                scales_first=shape.scales_first or 0 < group < FP4_LANE,
                has_ptx=not chip.is_amd and chip.arch != "cpu",
            )
        return shape._replace(
            depths=depths,
            scale_rows=weight.rows,
            has_block_scales=weight.depth == BLOCK,
            is_native=chip.has_fp8,
            is_decoded=not chip.rounds_to_fp8,
            is_static=weight.input_scale is not None,
            is_swapped=True,
        )


@triton.constexpr_function
def lane(group):
    """Returns the number of adjacent inputs in low halves of bytes; as many in high halves
    follow."""
    return min(group, FP4_LANE) if group > 0 else FP4_LANE


@triton.constexpr_function
def split_inputs(inputs, split_k, block_k):
    """Returns the inputs of a split in whole steps; the last split may have fewer."""
    return -(-inputs // (split_k * block_k)) * block_k


@triton.jit
def columns(SHAPE: tl.constexpr):
    """Returns offsets [K] of a step's inputs in a row of activations, and of their weights in a row
    of bytes. A byte holds two four-bit numbers; the inputs are those of the low halves (see
    `forms.Int4`)."""
    if SHAPE.group:
        LANE: tl.constexpr = lane(SHAPE.group)
        o_w = tl.arange(0, SHAPE.block_k // 2)
        return o_w // LANE * (2 * LANE) + o_w % LANE, o_w
    else:
        o_k = tl.arange(0, SHAPE.block_k)
        return o_k, o_k


@triton.jit
def find_row(weight, expert, row, SHAPE: tl.constexpr):
    """Returns pointers to the numbers, scales and zero points of rows `row` [N] of an expert.
    Pointers to what a form does not have must not be used."""
    HEIGHT: tl.constexpr = 2 * SHAPE.outputs if SHAPE.is_gated else SHAPE.outputs
    PITCH: tl.constexpr = SHAPE.inputs // 2 if SHAPE.group else SHAPE.inputs
    p_w = weight.numbers + expert * (HEIGHT * PITCH) + row * PITCH
    if weight.scales is None:
        return p_w, p_w, p_w
    else:
        first = expert * ((HEIGHT + SHAPE.scale_rows - 1) // SHAPE.scale_rows * SHAPE.depths)
        p_scale = weight.scales + first + row // SHAPE.scale_rows * SHAPE.depths
        p_zero = p_scale
        if weight.zeros is not None:
            ZEROS: tl.constexpr = SHAPE.depths if SHAPE.group > 0 else 1
            p_zero = weight.zeros + (expert * HEIGHT + row) * ZEROS
        return p_w, p_scale, p_zero


@triton.jit
def find_both(weight, expert, column, SHAPE: tl.constexpr):
    """Returns `find_row` of the gates of outputs `column` [N], and of the outputs."""
    gate = find_row(weight, expert, column, SHAPE)
    up = gate
    if SHAPE.is_gated:
        # Up rows stand after the gates'.
        up = find_row(weight, expert, column + SHAPE.outputs, SHAPE)
    return gate, up


@triton.jit
def load_scales(p_row, i_k, SHAPE: tl.constexpr):
    """Loads the scales of the step from input i_k on, for rows from `find_row`. Returns a tuple:

    - FP8 with a scale per block: (scales [N],). Forms with one scale per row: a placeholder.
    - Int4: scales and zero points of the groups in the bytes' low halves, then those of the groups
      in their high halves; [N], or [N, G] if a half has several groups.
    - e2m1: scales [N, G] of the low halves, and of the high halves.

    Loops call this a step ahead, because Triton does not prefetch these loads."""
    p_scale, p_zero = p_row[1], p_row[2]
    i_k = tl.minimum(i_k, SHAPE.inputs - SHAPE.block_k)
    if SHAPE.group > 0:
        place, scales = i_k // SHAPE.group, ()
        if 2 * SHAPE.group < SHAPE.block_k:
            place += 2 * tl.arange(0, SHAPE.block_k // (2 * SHAPE.group))[None, :]
            p_scale, p_zero = p_scale[:, None], p_zero[:, None]
        for half in tl.static_range(2):
            offset = place + (half if SHAPE.group < SHAPE.block_k else 0)
            scales += (tl.load(p_scale + offset), tl.load(p_zero + offset))
        return scales
    elif SHAPE.group < 0:
        GROUPS: tl.constexpr = SHAPE.block_k // (2 * -SHAPE.group)
        p_group = p_scale[:, None] + i_k // -SHAPE.group + tl.arange(0, GROUPS)[None, :]
        return tl.load(p_group), tl.load(p_group + GROUPS)
    elif SHAPE.has_block_scales:
        return (tl.load(p_scale + i_k // SHAPE.block_k),)
    else:
        return (tl.zeros([1], tl.float32),)


@triton.jit
def load_row_scale(p_row_scale, stride, i_k, SHAPE: tl.constexpr):
    """Loads the scales [M] of rows that were rounded in blocks, as `load_scales` does."""
    i_k = tl.minimum(i_k, SHAPE.inputs - SHAPE.block_k)
    if SHAPE.has_block_scales and p_row_scale is not None:
        return tl.load(p_row_scale + i_k // SHAPE.block_k * stride)
    else:
        return tl.zeros([1], tl.float32)
