"""The gated norm after a recurrence: of a head, or in Mamba2 of a group of heads.

Legend: T tokens, W entries that are normed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.platform.numerics import sigmoid, silu
from milepost.kernels.recurrent.structures import Mixer

_NORMED = 4096
"""Entries per program of `_norm_kernel`."""


@triton.jit
def gated_norm(y, weight, gate, eps, WIDTH: tl.constexpr, SIZES: tl.constexpr):
    """Norms the rows of `y` by their root mean square, unless `weight` is None, and multiplies them
    by SiLU or the sigmoid of `gate`, after the norm or before it."""
    if SIZES.gates_first:
        y *= _open(gate, SIZES)
    if weight is not None:
        y = y * tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps) * weight
    if not SIZES.gates_first:
        y *= _open(gate, SIZES)
    return y


@triton.jit
def _open(gate, SIZES: tl.constexpr):
    if SIZES.gates_by_sigmoid:
        return sigmoid(gate)
    else:
        return silu(gate.to(tl.float32))


def norm_units(mixer: Mixer, y: Tensor, sequence_begin: Tensor) -> Tensor:
    """Returns `y` [T, I] gated and normed, unit by unit; zeros for tokens of no sequence."""
    sizes, output = mixer.sizes, torch.empty_like(y)
    block = triton.next_power_of_2(sizes.group * sizes.own)
    rows, ends = max(1, _NORMED // block), (sequence_begin, len(sequence_begin) - 1)
    operands = y, mixer.inputs.gate, len(y), *ends, mixer.weights, output
    grid = sizes.units, triton.cdiv(len(y), rows)
    options = {"num_warps": 4, **OVERLAPPED}
    _norm_kernel[grid](*operands, SIZES=sizes, ROWS=rows, BLOCK=block, **options)
    return output


@quick
@triton.jit
def _norm_kernel(
    y,
    gate,
    num_tokens,
    sequence_begin,
    num_sequences,
    weights,
    output,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gates and norms one unit of ROWS tokens."""
    W: tl.constexpr = SIZES.group * SIZES.own
    i_g = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < W
    b_weight = None
    if weights.norm is not None:
        b_weight = tl.load(weights.norm + i_g * W + column, is_column, 0)[None, :]
    begin, end = tl.load(sequence_begin), tl.load(sequence_begin + num_sequences)
    wait_for_inputs()
    is_real = ((token >= begin) & (token < end))[:, None] & is_column[None, :]
    at = i_g * W + column[None, :]
    row = token.to(tl.int64)[:, None]
    b_y = tl.load(y + row * SIZES.width + at, is_real, 0).to(tl.float32)
    b_gate = tl.load(gate.base + row * gate.stride + at, is_real, 0)
    b_y = gated_norm(b_y, b_weight, b_gate, weights.norm_eps, W, SIZES)
    in_output = (token < num_tokens)[:, None] & is_column[None, :]
    p_output = output + row * SIZES.width + at
    tl.store(p_output, tl.where(is_real, b_y, 0).to(output.dtype.element_ty), in_output)
