"""Triton: makes a 16-bit matrix of four-bit weights, for GEMMs with enough rows.

Legend: N outputs, K inputs of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK, FourBits
from milepost.kernels.products.portable import float4
from milepost.kernels.products.portable.gemm_step import (
    columns,
    constants,
    dequantise,
    factors,
    load_scales,
    operands,
)

_BLOCK_N = 64


def unpack(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """Returns the weights [..., O, I] of one matrix or a stack, rounded to a 16-bit type."""
    *lead, num_inputs = *weight.packed.shape[:-1], weight.num_inputs
    output = torch.empty(*lead, num_inputs, dtype=dtype, device=weight.packed.device)
    num_rows = output.numel() // num_inputs
    known = constants(weight, probe(output.device))
    _unpack_kernel[(triton.cdiv(num_rows, _BLOCK_N), num_inputs // BLOCK)](
        *operands(weight, probe(output.device)),
        output,
        INPUTS=num_inputs,
        ROWS=num_rows,
        BLOCK_N=_BLOCK_N,
        **{name: known[name] for name in ("BLOCK_K", "GROUP", "DEPTHS")},
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    LANE: tl.constexpr = min(GROUP, 64) if GROUP > 0 else 64
    TYPE: tl.constexpr = output.dtype.element_ty
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (o_n % ROWS).to(tl.int64)
    i_k = tl.program_id(1) * BLOCK_K
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_scale, p_zero = scales + row * DEPTHS, zeros + row * (DEPTHS if GROUP > 0 else 1)
    b_w = tl.load(packed + row[:, None] * (INPUTS // 2) + i_k // 2 + o_w[None, :]).to(tl.int16)
    target = output + row[:, None] * INPUTS + i_k + o_x[None, :]
    mask = (o_n < ROWS)[:, None]
    if GROUP < 0:
        low_scale, high_scale, _ = load_scales(
            p_scale, p_zero, None, ROWS, i_k, INPUTS, BLOCK_K, GROUP, False
        )
        factor = factors(p_zero)[:, None]
        low = (float4.weights(b_w & 15, low_scale, TYPE) * factor).to(TYPE)
        high = (float4.weights(b_w >> 4, high_scale, TYPE) * factor).to(TYPE)
    else:
        low = dequantise(b_w & 15, p_scale, p_zero, i_k, TYPE, BLOCK_K, GROUP)
        high = dequantise(b_w >> 4, p_scale, p_zero, i_k + LANE, TYPE, BLOCK_K, GROUP)
    tl.store(target, low, mask=mask)
    tl.store(target + LANE, high, mask=mask)
