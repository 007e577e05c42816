"""Triton: dense products of several rows with weights of every form.

Few rows take the time that reading the weight takes. A weight with few outputs is also cut along
its inputs, so that every SM reads some of it. The reader of the result adds up the split-K
partials, always in the same order.

Legend: T tokens, I inputs, O outputs, S split-K partials; M rows, N outputs of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, check_contiguous, check_rows
from milepost.kernels.products.forms import Packed, Raw
from milepost.kernels.products.portable import gemm_step
from milepost.kernels.products.portable.rounding import readable, round_rows
from milepost.kernels.products.portable.tiles import FEW, SplitTiles, num_programs
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors, split_inputs
from milepost.kernels.products.run import Multiplication


def run(given: Multiplication, cut: SplitTiles) -> Tensor:
    """Multiplies several rows by a weight of any form: see `products.run`. Few FP8 rows are rounded
    on the way."""
    weight, chip, tiles, split_k = given.weight, given.chip, cut.tiles, cut.split_k
    assert not isinstance(weight, Packed), "a form of kernels"
    if is_raw := isinstance(weight, Raw):
        check_rows(hidden=given.values)
        check_contiguous(weight=weight.values)
    are_few = tiles.block_m <= FEW.block_m
    rows, row_scales = round_rows(given.rows, weight, chip, are_few=are_few)
    output, num_tiles = given.output(split_k), cdiv(weight.num_outputs, tiles.block_n)
    overlaps = given.launch_dependents
    if is_raw:
        overlaps = 2 * num_tiles * split_k <= num_programs(chip.num_sms)
    how = {"split_k": split_k, "is_rounded": row_scales is not None, **tiles.sizes}
    _gemm_kernel[(num_tiles, split_k, cdiv(len(rows), tiles.block_m))](
        readable(rows, chip),
        row_scales,
        WeightTensors.of(weight, chip),
        given.bias,
        output,
        len(rows),
        rows.stride(0),
        0 if row_scales is None else row_scales.stride(0),
        output.stride(-2),
        MULTIPLY=gemm_step.choose(weight),
        SHAPE=ProductShape.of(weight, chip, **how),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **(OVERLAPPED if overlaps else {}),
    )
    return output if split_k == 1 else output.transpose(0, 1)


@quick
@triton.jit(do_not_specialize=("num_rows", "scales_stride"))
def _gemm_kernel(
    rows,
    row_scales,
    weight,
    bias,
    output,
    num_rows,
    stride,
    scales_stride,
    output_stride,
    MULTIPLY: tl.constexpr,
    SHAPE: tl.constexpr,
):
    launch_dependents()
    BLOCK_N: tl.constexpr = SHAPE.block_n
    INPUTS: tl.constexpr = split_inputs(SHAPE.inputs, SHAPE.split_k, SHAPE.block_k)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    o_m = tl.program_id(2) * SHAPE.block_m + tl.arange(0, SHAPE.block_m)
    is_row, is_column = o_m < num_rows, o_n < SHAPE.outputs
    # Rows beyond the last read row 0 and outputs beyond the last wrap: neither is stored.
    row, column = tl.where(is_row, o_m, 0).to(tl.int64), (o_n % SHAPE.outputs).to(tl.int64)
    p_row_scale = None if row_scales is None else row_scales + row
    wait_for_inputs()
    p_x, first = rows + row[:, None] * stride, split * INPUTS
    acc, _ = MULTIPLY(p_x, p_row_scale, scales_stride, weight, 0, column, first, SHAPE)
    b_bias = None
    if bias is not None:
        b_bias = tl.load(bias + o_n, mask=is_column & (split == 0), other=0.0).to(tl.float32)
    target = (split.to(tl.int64) * num_rows + o_m) * output_stride
    # Sums of quantised weights are transposed after scaling; those of raw weights are not.
    if SHAPE.is_swapped and weight.scales is None:
        if b_bias is not None:
            acc += b_bias[:, None]
        mask = is_column[:, None] & is_row[None, :]
        b_o = acc.to(output.dtype.element_ty)
        tl.store(output + target[None, :] + o_n[:, None], b_o, mask=mask)
    else:
        if SHAPE.is_swapped:
            acc = tl.trans(acc)
        if b_bias is not None:
            acc += b_bias[None, :]
        mask = is_row[:, None] & is_column[None, :]
        b_o = acc.to(output.dtype.element_ty)
        tl.store(output + target[:, None] + o_n[None, :], b_o, mask=mask)


def add_up(partials: Tensor, dtype: torch.dtype, output: Tensor | None = None) -> Tensor:
    """Adds up split-K partials [T, S, O] from `run` and returns them as `dtype` [T, O], in `output`
    if given, whose rows may be strided."""
    num_tokens, split_k, num_outputs = partials.shape
    if output is None:
        output = torch.empty(num_tokens, num_outputs, dtype=dtype, device=partials.device)
    _add_up_kernel[(cdiv(num_tokens * num_outputs, 512),)](
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
