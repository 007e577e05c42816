"""Linear projections of few rows on a GPU: the time is that of reading the weight once.

A weight with few outputs is also cut along its inputs, so that every SM reads some of it; whoever
reads the result next adds the split-K partials up, in a fixed order, so that bits do not vary from
run to run.

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import num_sms, probe, runs_gluon
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.strides import check_contiguous, check_rows
from milepost.kernels.tiles import Tiles, choose_split_k, num_programs

_FEW_ROWS = Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, is_swapped=True)
_FEW_LONG_ROWS = Tiles(
    block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=5, is_swapped=True
)
_LONG = 4096
"""Inputs from which on another stage pays."""
_MORE_ROWS = Tiles(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=4)
_FEW_OUTPUTS = 1024
"""Up to so many outputs torch's GEMM leaves most SMs idle."""
_FEW_INPUTS = 128
_NARROW = {"block_n": 32, "block_k": _FEW_INPUTS, "num_warps": 4}
"""For one row of few inputs."""


def multiply_few(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, lets_next_start: bool = True
) -> Tensor | None:
    """The result [T, O], or its partials [T, S, O] in float32, if that is faster here than torch's
    GEMM, else None.

    `hidden` [T, I] in bfloat16 or float16, rows may lie apart; `weight` [O, I] contiguous.
    """
    if bias is None and runs_gluon(hidden):
        from milepost.kernels.linear import hopper_tiles, triton_hopper

        spread = hopper_tiles.find_tiles(hidden, weight)
        if spread is not None:
            return triton_hopper.multiply(hidden, weight, spread, lets_next_start=lets_next_start)
    num_tokens, num_outputs = hidden.shape[0], weight.shape[0]
    if num_tokens == 0 or hidden.stride(1) != 1:
        return None
    if num_tokens == 1:
        return _multiply_row(hidden, weight, bias)
    if num_tokens <= _FEW_ROWS.block_m:
        tiles = _FEW_ROWS if weight.shape[1] < _LONG else _FEW_LONG_ROWS
    elif num_outputs <= _FEW_OUTPUTS:
        tiles = _MORE_ROWS
    else:
        return None
    tiles = tiles.fitted(probe(hidden.device))
    return multiply(hidden, weight, bias, tiles, _choose_split_k(weight, tiles))


def multiply_row_into(output: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `hidden` was one row; then `output` [1, O] is its product."""
    if len(hidden) != 1 or hidden.stride(1) != 1:
        return False
    _multiply_row(hidden, weight, bias, output)
    return True


def _multiply_row(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor | None = None
) -> Tensor:
    how = {"block_n": 4, "block_k": 2048, "num_warps": 8}
    if weight.shape[1] <= _FEW_INPUTS:
        how = _NARROW
    elif weight.shape[1] > 2048:
        how = {"block_n": 2, "block_k": 2048, "num_warps": 4}
    elif len(weight) > 1 << 15:
        how = {"block_n": 8, "block_k": 1024, "num_warps": 8}
    return gemv(hidden, weight, bias, **how, output=output)


def multiply_precise(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """`multiply_few` without bias, of few outputs too, and unrounded: float32."""
    if len(hidden) == 0 or hidden.stride(1) != 1:
        return None
    if len(hidden) == 1:
        block_n = 1 if len(weight) <= _FEW_OUTPUTS else 4
        how = {"block_n": block_n, "block_k": 2048, "num_warps": 8}
        return gemv(hidden, weight, None, **how, dtype=torch.float32)
    tiles = _FEW_ROWS if len(hidden) <= _FEW_ROWS.block_m else _MORE_ROWS
    tiles = tiles.fitted(probe(hidden.device))
    split_k = _choose_split_k(weight, tiles)
    return multiply(hidden, weight, None, tiles, split_k, dtype=torch.float32)


def multiply_gated(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """SiLU(gate) * up [T, O] of `hidden` [T, I] and `weight` [2 * O, I], whose first half are the
    gates, if that is faster here than two launches, else None."""
    if not runs_gluon(hidden):
        return None
    from milepost.kernels.linear import hopper_tiles, triton_hopper

    tiles = hopper_tiles.find_tiles(hidden, weight, is_gated=True)
    return None if tiles is None else triton_hopper.multiply(hidden, weight, tiles, is_gated=True)


def _choose_split_k(weight: Tensor, tiles: Tiles) -> int:
    return choose_split_k(*weight.shape, tiles, num_sms(weight.device))


def multiply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    split_k: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O], by default in
    `hidden`'s type.

    Cut along I in S = `split_k` > 1 the partials stay apart: [T, S, O] in float32.
    """
    check_rows(hidden=hidden)
    check_contiguous(weight=weight)
    num_tokens, num_inputs = hidden.shape
    num_outputs = weight.shape[0]
    if split_k == 1:
        output = hidden.new_empty(num_tokens, num_outputs, dtype=dtype)
    else:
        output = hidden.new_empty(split_k, num_tokens, num_outputs, dtype=torch.float32)
    grid = (
        triton.cdiv(num_outputs, tiles.block_n),
        split_k,
        triton.cdiv(num_tokens, tiles.block_m),
    )
    _gemm_kernel[grid](
        hidden,
        weight,
        bias,
        output,
        num_tokens,
        hidden.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLIT_K=split_k,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **(OVERLAPPED if 2 * grid[0] * grid[1] <= num_programs(num_sms(hidden.device)) else {}),
    )
    return output if split_k == 1 else output.transpose(0, 1)


def add_up(partials: Tensor, dtype: torch.dtype, output: Tensor | None = None) -> Tensor:
    """The sum over the second dimension of `partials` [T, S, O], as `multiply` returns them; in
    `output`, whose rows may lie apart, if there is one."""
    num_tokens, split_k, num_outputs = partials.shape
    if output is None:
        output = torch.empty(num_tokens, num_outputs, dtype=dtype, device=partials.device)
    _add_up_kernel[(triton.cdiv(num_tokens * num_outputs, 512),)](
        partials,
        output,
        num_tokens * num_outputs,
        output.stride(0),
        OUTPUTS=num_outputs,
        SPLIT_K=split_k,
        BLOCK=512,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@triton.jit(do_not_specialize=("num_tokens",))
def _gemm_kernel(
    hidden,
    weight,
    bias,
    output,
    num_tokens,
    stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    let_next_start()
    # Whole steps for each split; the last may get fewer.
    SHARE: tl.constexpr = (INPUTS + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = o_m < num_tokens
    is_column = o_n < OUTPUTS
    o_k = split * SHARE + tl.arange(0, BLOCK_K)
    # Rows beyond the last read row 0 and outputs beyond the last wrap: neither is stored.
    p_x = hidden + tl.where(is_row, o_m, 0).to(tl.int64)[:, None] * stride + o_k[None, :]
    p_w = weight + (o_n % OUTPUTS).to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    wait_for_inputs()
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(0, SHARE, BLOCK_K):
        if INPUTS % (SPLIT_K * BLOCK_K) == 0:
            b_x = tl.load(p_x + i_k)
            b_w = tl.load(p_w + i_k)
        else:
            is_input = (i_k + o_k < INPUTS)[None, :]
            b_x = tl.load(p_x + i_k, mask=is_input, other=0.0)
            b_w = tl.load(p_w + i_k, mask=is_input, other=0.0)
        if SWAPPED:
            acc = tl.dot(b_w, tl.trans(b_x), acc, input_precision="ieee")
        else:
            acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
    if bias is not None:
        has_bias = is_column & (split == 0)
        b_bias = tl.load(bias + o_n, mask=has_bias, other=0.0).to(tl.float32)
        if SWAPPED:
            acc += b_bias[:, None]
        else:
            acc += b_bias[None, :]
    target = (split.to(tl.int64) * num_tokens + o_m) * OUTPUTS
    b_o = acc.to(output.dtype.element_ty)
    if SWAPPED:
        mask = is_column[:, None] & is_row[None, :]
        tl.store(output + target[None, :] + o_n[:, None], b_o, mask=mask)
    else:
        mask = is_row[:, None] & is_column[None, :]
        tl.store(output + target[:, None] + o_n[None, :], b_o, mask=mask)


@triton.jit(do_not_specialize=("size",))
def _add_up_kernel(
    partials,
    output,
    size,
    stride,
    OUTPUTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_index = index < size
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partials + split * size + index, mask=is_index, other=0.0)
    target = output + (index // OUTPUTS).to(tl.int64) * stride + index % OUTPUTS
    tl.store(target, acc.to(output.dtype.element_ty), mask=is_index)


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
    """`multiply` for very few rows, without tensor cores; into `output`, whose rows may lie apart,
    if there is one."""
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
    let_next_start()
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
    let_next_start()
    head = tl.program_id(1)
    o_n, o_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = o_n < OUTPUTS, o_k < INPUTS
    at = head * head_stride + o_k[:, None] * input_stride + o_n[None, :] * output_stride
    b_w = tl.load(weight + at, is_input[:, None] & is_output[None, :], 0.0)
    wait_for_inputs()
    b_x = tl.load(hidden + head * hidden_stride + o_k, is_input, 0.0)
    b_o = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[:, None], 0)
    tl.store(output + head * OUTPUTS + o_n, b_o.to(output.dtype.element_ty), is_output)


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
    let_next_start()
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
