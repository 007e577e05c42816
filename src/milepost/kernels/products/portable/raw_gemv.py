"""Products of one row, or few, on a GPU without tensor cores: a program reads some rows of the
weight and multiplies as it goes.

Legend: T tokens, I inputs, O outputs, H heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_rows

_FEW_INPUTS = 128
_NARROW = {"block_n": 32, "block_k": _FEW_INPUTS, "num_warps": 4}
"""For one row of few inputs."""
_SOME_OUTPUTS = 4096
"""From so many on programs of half as many threads read faster."""


def multiply_row(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor | None = None
) -> Tensor:
    """[1, O] of `hidden` [1, I], `weight` [O, I] and `bias` [O]; in `output` if there is one."""
    how = {"block_n": 4, "block_k": 2048, "num_warps": 8}
    if weight.shape[1] <= _FEW_INPUTS:
        how = _NARROW
    elif weight.shape[1] > 2048:
        how = {"block_n": 2, "block_k": 2048, "num_warps": 4}
    elif len(weight) >= _SOME_OUTPUTS:
        how = {"block_n": 4, "block_k": 1024, "num_warps": 4}
    return gemv(hidden, weight, bias, **how, output=output)


def multiply_row_into(output: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `hidden` was one row; then `output` [1, O] is its product."""
    if len(hidden) != 1 or hidden.stride(1) != 1:
        return False
    multiply_row(hidden, weight, bias, output)
    return True


def gemv(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    block_n: int,
    block_k: int,
    num_warps: int,
    dtype: torch.dtype | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """As `triton.multiply`, uncut; into `output`, whose rows may lie apart, if there is one."""
    num_tokens, num_inputs = hidden.shape
    num_outputs = weight.shape[0]
    if output is None:
        output = hidden.new_empty(num_tokens, num_outputs, dtype=dtype)
    _gemv_kernel[(triton.cdiv(num_outputs, block_n), num_tokens)](
        hidden,
        weight,
        bias,
        output,
        hidden.stride(0),
        output.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _gemv_kernel(
    hidden,
    weight,
    bias,
    output,
    stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    is_column = o_n < OUTPUTS
    o_k = tl.arange(0, BLOCK_K)
    p_w = weight + (o_n % OUTPUTS).to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    b_w = tl.load(p_w, mask=o_k[None, :] < INPUTS, other=0.0)
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        is_input = i_k + o_k < INPUTS
        if i_k > 0:
            b_w = tl.load(p_w + i_k, mask=is_input[None, :], other=0.0)
        b_x = tl.load(hidden + token * stride + i_k + o_k, mask=is_input, other=0.0)
        acc += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    acc = tl.sum(acc, 1)
    if bias is not None:
        acc += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = acc.to(output.dtype.element_ty)
    tl.store(output + token * output_stride + o_n, b_o, mask=is_column)


def multiply_both(
    inputs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Each of two rows [1, I] of few inputs times its weight [O, I], if they are no more."""
    shapes = {(*row.shape, *weight.shape) for row, weight in zip(inputs, weights, strict=True)}
    num_tokens, num_inputs = inputs[0].shape
    if len(shapes) > 1 or num_tokens != 1 or num_inputs > _FEW_INPUTS:
        return None
    check_rows(first=inputs[0], second=inputs[1])
    num_outputs = len(weights[0])
    outputs = inputs[0].new_empty(2, 1, num_outputs)
    _both_kernel[(triton.cdiv(num_outputs, _NARROW["block_n"]), 2)](
        *inputs,
        *weights,
        outputs,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_N=_NARROW["block_n"],
        BLOCK_K=_NARROW["block_k"],
        num_warps=_NARROW["num_warps"],
        **OVERLAPPED,
    )
    return outputs[0], outputs[1]


@quick
@triton.jit
def _both_kernel(
    hidden,
    other_hidden,
    weight,
    other_weight,
    outputs,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Either of two pointers is no pointer that AMD's compiler follows.
    if tl.program_id(1) == 0:
        _narrow_row(hidden, weight, outputs, o_n, INPUTS, OUTPUTS, BLOCK_K)
    else:
        _narrow_row(other_hidden, other_weight, outputs + OUTPUTS, o_n, INPUTS, OUTPUTS, BLOCK_K)


@triton.jit
def _narrow_row(
    hidden,
    weight,
    output,
    o_n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some outputs of a row that one step takes in."""
    o_k = tl.arange(0, BLOCK_K)
    is_output, is_input = o_n < OUTPUTS, o_k < INPUTS
    at = o_n[:, None] * INPUTS + o_k[None, :]
    b_w = tl.load(weight + at, is_output[:, None] & is_input[None, :], 0.0)
    wait_for_inputs()
    b_x = tl.load(hidden + o_k, is_input, 0.0)
    b_o = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    tl.store(output + o_n, b_o.to(output.dtype.element_ty), is_output)


def multiply_heads(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """`hidden` [T, H, I] times `weight` [H, I, O], head by head: [T, H, O] for a token, else None.
    Rows of `hidden` may lie apart; `weight` may be transposed in memory."""
    num_tokens, num_heads, num_inputs = hidden.shape
    if num_tokens != 1 or hidden.stride(2) != 1:
        return None
    num_outputs = weight.shape[2]
    block_n = max(1, 16384 // triton.next_power_of_2(num_inputs))
    output = hidden.new_empty(1, num_heads, num_outputs)
    _heads_kernel[(triton.cdiv(num_outputs, block_n), num_heads)](
        hidden,
        weight,
        output,
        hidden.stride(1),
        *weight.stride(),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(num_inputs),
        num_warps=8,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _heads_kernel(
    hidden,
    weight,
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
    """BLOCK_N outputs of a head."""
    launch_dependents()
    head = tl.program_id(1)
    o_n, o_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = o_n < OUTPUTS, o_k < INPUTS
    at = head * head_stride + o_k[:, None] * input_stride + o_n[None, :] * output_stride
    b_w = tl.load(weight + at, is_input[:, None] & is_output[None, :], 0.0)
    wait_for_inputs()
    b_x = tl.load(hidden + head * hidden_stride + o_k, is_input, 0.0)
    b_o = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[:, None], 0)
    tl.store(output + head * OUTPUTS + o_n, b_o.to(output.dtype.element_ty), is_output)
