"""Triton: four-bit weights as a matrix in 16 bits, for GEMMs of so many rows that this pays.

Legend: N outputs, K inputs of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Int4
from milepost.kernels.quantised.triton_step import columns, dequantise

_BLOCK_N = 64


def unpack(weight: Int4, dtype: torch.dtype) -> Tensor:
    """The weights [..., O, I] of one matrix or a stack, rounded to a 16-bit type."""
    *lead, num_inputs = *weight.packed.shape[:-1], weight.num_inputs
    output = torch.empty(*lead, num_inputs, dtype=dtype, device=weight.packed.device)
    num_rows = output.numel() // num_inputs
    _unpack_kernel[(triton.cdiv(num_rows, _BLOCK_N), num_inputs // BLOCK)](
        weight.packed,
        weight.scales,
        weight.zeros,
        output,
        INPUTS=num_inputs,
        ROWS=num_rows,
        GROUP=weight.group,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _unpack_kernel(
    packed,
    scales,
    zeros,
    output,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    LANE: tl.constexpr = min(GROUP, 64)
    TYPE: tl.constexpr = output.dtype.element_ty
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (o_n % ROWS).to(tl.int64)
    i_k = tl.program_id(1) * BLOCK_K
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_scale, p_zero = scales + row * (INPUTS // GROUP), zeros + row * (INPUTS // GROUP)
    b_w = tl.load(packed + row[:, None] * (INPUTS // 2) + i_k // 2 + o_w[None, :]).to(tl.int16)
    target = output + row[:, None] * INPUTS + i_k + o_x[None, :]
    mask = (o_n < ROWS)[:, None]
    low = dequantise(b_w & 15, p_scale, p_zero, i_k, TYPE, BLOCK_K, GROUP)
    tl.store(target, low, mask=mask)
    high = dequantise(b_w >> 4, p_scale, p_zero, i_k + LANE, TYPE, BLOCK_K, GROUP)
    tl.store(target + LANE, high, mask=mask)
