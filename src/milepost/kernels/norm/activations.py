"""Activations and gates on a GPU: `reference`'s functions, each in one launch, in float32.

Legend: T tokens, I size of a feed-forward layer, H heads, V value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate, sigmoid
from milepost.kernels.platform.tensors import cdiv, check_rows, next_power_of_2

_COLUMNS = 1024


def silu_mul(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """See `reference.silu_mul`; rows of `gate_up` may be strided."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    return _activate(gate_up, output, is_gated=True, limit=limit)


def relu_squared(hidden: Tensor) -> Tensor:
    """See `reference.relu_squared`; rows of `hidden` may be strided."""
    return _activate(hidden, hidden.new_empty(hidden.shape), is_gated=False)


def _activate(inputs: Tensor, output: Tensor, *, is_gated: bool, limit: float = 0.0) -> Tensor:
    num_tokens, size = output.shape
    _activate_kernel[(num_tokens, cdiv(size, _COLUMNS))](
        inputs,
        output,
        inputs.stride(0),
        SIZE=size,
        COLUMNS=_COLUMNS,
        GATED=is_gated,
        LIMIT=limit,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _activate_kernel(
    inputs,
    output,
    stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_i = o_i < SIZE
    p_x = inputs + i_t * stride + o_i
    b_x = tl.load(p_x, mask=is_i, other=0.0).to(tl.float32)
    b_up = b_x
    if GATED:
        b_up = tl.load(p_x + SIZE, mask=is_i, other=0.0).to(tl.float32)
    b_o = activate(b_up, b_x, GATED, LIMIT)
    tl.store(output + i_t * SIZE + o_i, b_o.to(output.dtype.element_ty), mask=is_i)


def gate_heads(hidden: Tensor, gate: Tensor) -> Tensor:
    """See `reference.gate_heads`; rows of `gate` may be strided."""
    check_rows(gate=gate)
    num_tokens, num_heads, size = hidden.shape
    assert hidden.is_contiguous(), "heads are side by side"
    _gate_heads_kernel[(num_tokens, num_heads)](
        hidden,
        gate,
        gate.stride(0),
        HEADS=num_heads,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        num_warps=1,
        **OVERLAPPED,
    )
    return hidden


@quick
@triton.jit
def _gate_heads_kernel(
    hidden, gate, stride, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    launch_dependents()
    wait_for_inputs()
    token, head, o_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    p_x = hidden + (token * HEADS + head) * SIZE + o_v
    b_x = tl.load(p_x, o_v < SIZE, 0).to(tl.float32)
    b_x *= sigmoid(tl.load(gate + token * stride + head))
    tl.store(p_x, b_x.to(hidden.dtype.element_ty), o_v < SIZE)
