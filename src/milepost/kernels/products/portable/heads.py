"""Triton: products of one token with raw weights, several in a launch: of two rows, and of heads.

Legend: I inputs, O outputs, H heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import sigmoid
from milepost.kernels.platform.tensors import check_rows
from milepost.kernels.platform.tiles import cdiv, next_power_of_2
from milepost.kernels.products.gemv_tiles import NARROW
from milepost.kernels.products.portable.gemv_step import multiply_raw
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors


def multiply_pair(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Multiplies two rows [1, I] of few inputs, each by its weight [O, I]."""
    check_rows(first=rows[0], second=rows[1])
    (num_outputs, num_inputs), tiles = weights[0].shape, NARROW
    outputs = rows[0].new_empty(2, 1, num_outputs)
    _pair_kernel[(cdiv(num_outputs, tiles.block_n), 2)](
        *rows,
        *(WeightTensors(each) for each in weights),
        outputs,
        SHAPE=ProductShape(num_inputs, num_outputs, tiles.block_n, tiles.block_k),
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )
    return outputs[0], outputs[1]


@quick
@triton.jit
def _pair_kernel(hidden, other_hidden, weight, other_weight, outputs, SHAPE: tl.constexpr):
    launch_dependents()
    # Either of two pointers is no pointer that AMD's compiler follows.
    if tl.program_id(1) == 0:
        _multiply_row(hidden, weight, outputs, SHAPE)
    else:
        _multiply_row(other_hidden, other_weight, outputs + SHAPE.outputs, SHAPE)


@triton.jit
def _multiply_row(hidden, weight, output, SHAPE: tl.constexpr):
    """Makes the program's outputs of a row."""
    o_n = tl.program_id(0) * SHAPE.block_n + tl.arange(0, SHAPE.block_n)
    b_o, _ = multiply_raw(hidden, weight, 0, o_n % SHAPE.outputs, SHAPE, True)
    tl.store(output + o_n, b_o.to(output.dtype.element_ty), mask=o_n < SHAPE.outputs)


def multiply_heads(hidden: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    """Multiplies `hidden` [1, H, I] by `weight` [H, I, O], head by head, and by the sigmoid of
    `gate` [1, H] if there is one: [1, H, O]. Heads of `hidden` may lie apart; `weight` may be
    transposed in memory."""
    _, num_heads, num_inputs = hidden.shape
    num_outputs = weight.shape[2]
    block_n = max(1, 16384 // next_power_of_2(num_inputs))
    output = hidden.new_empty(1, num_heads, num_outputs)
    _heads_kernel[(cdiv(num_outputs, block_n), num_heads)](
        hidden,
        weight,
        gate,
        output,
        hidden.stride(1),
        *weight.stride(),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        BLOCK_K=next_power_of_2(num_inputs),
        num_warps=8,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _heads_kernel(
    hidden,
    weight,
    gate,
    output,
    hidden_stride,
    head_stride,
    input_stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_N outputs of a head."""
    launch_dependents()
    head = tl.program_id(1)
    o_n, o_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = o_n < OUTPUTS, o_k < INPUTS
    at = head * head_stride + o_k[:, None] * input_stride + o_n[None, :] * output_stride
    b_w = tl.load(weight + at, is_input[:, None] & is_output[None, :], 0.0)
    wait_for_inputs()
    b_x = tl.load(hidden + head * hidden_stride + o_k, is_input, 0.0)
    b_o = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[:, None], 0)
    if gate is not None:
        b_o *= sigmoid(tl.load(gate + head))
    tl.store(output + head * OUTPUTS + o_n, b_o.to(output.dtype.element_ty), is_output)
