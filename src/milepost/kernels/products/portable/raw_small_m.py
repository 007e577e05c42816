"""Triton: products of few rows with raw weights; reading the weight once is what costs.

A weight with few outputs is also cut along its inputs, so that every SM reads some of it. The
reader of the result adds the split-K partials up, always in the same order.

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.platform.tiles import num_programs
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import SplitTiles


def run(given: Multiplication, cut: SplitTiles) -> Tensor:
    """Multiplies a few rows by raw weights."""
    hidden, weight, tiles, split_k = given.values, given.weight, cut.tiles, cut.split_k
    assert isinstance(weight, Raw), "the kernel's form"
    check_rows(hidden=hidden)
    check_contiguous(weight=weight.values)
    output = given.new_output(split_k)
    grid = (
        triton.cdiv(weight.num_outputs, tiles.block_n),
        split_k,
        triton.cdiv(len(hidden), tiles.block_m),
    )
    overlaps = 2 * grid[0] * grid[1] <= num_programs(given.chip.num_sms)
    _gemm_kernel[grid](
        hidden,
        weight.values,
        given.bias,
        output,
        len(hidden),
        hidden.stride(0),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLIT_K=split_k,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **(OVERLAPPED if overlaps else {}),
    )
    return output if split_k == 1 else output.transpose(0, 1)


def add_up(partials: Tensor, dtype: torch.dtype, output: Tensor | None = None) -> Tensor:
    """Adds up the second dimension of `partials` [T, S, O], as `run` returns them; into `output`,
    whose rows may lie apart, if there is one."""
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


@quick
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
    launch_dependents()
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


@quick
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
    launch_dependents()
    wait_for_inputs()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_index = index < size
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partials + split * size + index, mask=is_index, other=0.0)
    target = output + (index // OUTPUTS).to(tl.int64) * stride + index % OUTPUTS
    tl.store(target, acc.to(output.dtype.element_ty), mask=is_index)
