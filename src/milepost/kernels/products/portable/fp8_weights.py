"""Triton: FP8 weights times rows that stay as they are, for chips without arithmetic in float8.
Numbers become the rows' type in registers, which is exact.

Legend: K inputs of a step, D blocks of BLOCK inputs of a step, M rows, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.portable.weights import find_row, load_scales

_BLOCK = tl.constexpr(BLOCK)
_BIASES = tl.constexpr(2.0**120)
"""Factor by which a number grows that moves from float8 to bfloat16 with its exponent's bits."""
_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 low, high, sign, biases, zero;
    mov.b32 biases, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.u32 low, low, 4;
    and.b32 low, low, 0x07f007f0;
    or.b32 low, low, sign;
    and.b32 sign, high, 0x80008000;
    shr.u32 high, high, 4;
    and.b32 high, high, 0x07f007f0;
    or.b32 high, high, sign;
    fma.rn.bf16x2 $0, low, biases, zero;
    fma.rn.bf16x2 $1, high, biases, zero;
}
""")
"""Four bytes become two pairs of bfloat16, which are multiplied by 2^120."""


@triton.jit
def multiply(
    p_x,
    p_row_scale,  # noqa: ARG001
    stride,  # noqa: ARG001
    weight,
    expert,
    column,
    first,
    SHAPE: tl.constexpr,
):
    """Multiplies as `gemm_step.multiply_quantised`."""
    BLOCK_K: tl.constexpr = SHAPE.block_k
    STEPS: tl.constexpr = (SHAPE.inputs + SHAPE.split_k * BLOCK_K - 1) // (SHAPE.split_k * BLOCK_K)
    o_k = tl.arange(0, BLOCK_K)
    p_x += o_k[None, :]
    gate = find_row(weight, expert, column, SHAPE)
    up = gate
    if SHAPE.is_gated:
        # Up rows stand after the gates'.
        up = find_row(weight, expert, column + SHAPE.outputs, SHAPE)
    p_gate, p_up = gate[0][:, None] + o_k[None, :], up[0][:, None] + o_k[None, :]
    b_gate = tl.zeros([column.shape[0], p_x.shape[0]], tl.float32)
    b_up = b_gate
    gate_scale, up_scale = load_scales(gate, first, SHAPE)[0], load_scales(up, first, SHAPE)[0]
    stop = SHAPE.inputs
    if SHAPE.split_k > 1:
        stop = tl.minimum(first + STEPS * BLOCK_K, stop)
    for i_k in range(first, stop, BLOCK_K):
        next_up_scale = load_scales(up, i_k + BLOCK_K, SHAPE)[0]
        b_x = tl.trans(tl.load(p_x + i_k))
        if SHAPE.is_gated:
            next_gate_scale = load_scales(gate, i_k + BLOCK_K, SHAPE)[0]
            b_gate = _add(b_gate, b_x, tl.load(p_gate + i_k), gate_scale, SHAPE)
            gate_scale = next_gate_scale
        b_up = _add(b_up, b_x, tl.load(p_up + i_k), up_scale, SHAPE)
        up_scale = next_up_scale
    return _finish(b_up, up, p_x, SHAPE), _finish(b_gate, gate, p_x, SHAPE)


@triton.jit
def _add(acc, b_x, bits, scale, SHAPE: tl.constexpr):
    """Adds the product of a step's weights [N, K] and rows [K, M] to acc [N, M]."""
    b_w = _decode(bits, b_x.dtype)
    if SHAPE.has_block_scales:
        return acc + tl.dot(b_w, b_x) * scale[:, None]
    else:
        return tl.dot(b_w, b_x, acc)


@triton.jit
def _decode(bits, TYPE: tl.constexpr):
    """Returns numbers of float8_e4m3fn, given as bits, in bfloat16; or in float16 divided by
    256, whose exponents reach no lower."""
    wide = bits.to(tl.int16)
    sign = (wide & 0x80) << 8
    if tl.bfloat16 == TYPE:
        if is_cuda():
            return tl.inline_asm_elementwise(
                _TO_BFLOAT16, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4
            )
        else:
            return (sign | ((wide & 0x7F) << 4)).to(TYPE, bitcast=True) * _BIASES
    else:
        return (sign | ((wide & 0x7F) << 7)).to(TYPE, bitcast=True)


@triton.jit
def _finish(acc, p_row, p_x, SHAPE: tl.constexpr):
    """Multiplies sums [N, M] by the factors that all inputs share."""
    if not SHAPE.has_block_scales:
        acc *= tl.load(p_row[1])[:, None]
    if p_x.dtype.element_ty != tl.bfloat16:
        acc *= 256.0
    return acc


@triton.jit
def multiply_row(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies as `gemv_step.multiply_quantised`, block by block."""
    BLOCKS: tl.constexpr = SHAPE.inputs // _BLOCK
    BLOCK_D: tl.constexpr = SHAPE.block_k // _BLOCK
    gate = find_row(weight, expert, column, SHAPE)
    up = gate
    if SHAPE.is_gated:
        # Up rows stand after the gates'.
        up = find_row(weight, expert, column + SHAPE.outputs, SHAPE)
    ups = tl.zeros([column.shape[0]], tl.float32)
    gates = ups
    for i_d in tl.static_range(0, BLOCKS, BLOCK_D):
        o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, _BLOCK)
        is_input = (o_d < BLOCKS)[:, None]
        place = o_d[:, None] * _BLOCK + o_k[None, :]
        b_up = _load(up[0], place, is_input)
        if SHAPE.is_gated:
            b_gate = _load(gate[0], place, is_input)
        if EARLY and i_d == 0:
            wait_for_inputs()
        b_x = tl.load(p_x + place, mask=is_input, other=0.0).to(tl.float32)
        if SHAPE.is_gated:
            gates += _dot(b_gate, b_x, gate[1], o_d, SHAPE)
        ups += _dot(b_up, b_x, up[1], o_d, SHAPE)
    if not SHAPE.has_block_scales:
        gates *= tl.load(gate[1])
        ups *= tl.load(up[1])
    return ups, gates


@triton.jit
def _load(p_w, place, is_input):
    """Loads blocks of weights [N, D, K] of rows at `p_w` [N]."""
    return tl.load(p_w[:, None, None] + place[None, :, :], mask=is_input[None, :, :], other=0)


@triton.jit
def _dot(bits, b_x, p_scale, o_d, SHAPE: tl.constexpr):
    """Multiplies blocks of weights [N, D, K] by those of a row [D, K]: [N]."""
    sums = tl.sum(_decode(bits, tl.float16).to(tl.float32) * (256.0 * b_x)[None, :, :], 2)
    if SHAPE.has_block_scales:
        is_block = (o_d < SHAPE.inputs // _BLOCK)[None, :]
        sums *= tl.load(p_scale[:, None] + o_d[None, :], mask=is_block, other=0.0)
    return tl.sum(sums, 1)
