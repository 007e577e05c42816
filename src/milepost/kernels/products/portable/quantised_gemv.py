"""Triton: products of one row with quantised weights, where reading the weights is what costs.

Every program rounds its row on the way if the form asks for that, which needs no launch of its own.
A number of four bits stands in a float32's bits beside 1, and the surplus is subtracted from a
block's sum; numbers in e2m1 are summed up group by group.

Legend: T tokens, I inputs, O outputs; N rows of the weight, D blocks of BLOCK inputs of a step, W
numbers or bytes of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import encode, scale_of
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Quantised
from milepost.kernels.products.portable import float4
from milepost.kernels.products.portable.gemm_step import constants, factors, operands
from milepost.kernels.products.portable.rounding import widen
from milepost.kernels.products.run_products import Multiplication

WEIGHTS, FEW_WEIGHTS = 1 << 15, 1 << 14
"""Weights that a program reads at a time. The more, the less it matters that each rounds its row;
small matrices, and experts' last projections, need more programs."""
_SMALL = 1 << 24
"""Fewest weights of a matrix that is not small."""
_FOUR_BIT_WEIGHTS = 1 << 13
"""Weights of four bits that a program reads at a time: rows are not rounded, and more programs
share the work of unpacking."""
_DEPTH = 2048
"""Inputs of a step."""


def cut_up(
    weight: Quantised, chip: Chip, num_weights: int, num_matrices: int = 1
) -> dict[str, int]:
    """Returns the outputs and blocks of inputs of a step, and the weight's constants."""
    depth = min(triton.next_power_of_2(weight.num_inputs), _DEPTH)
    known, has_four_bits = constants(weight, chip), not isinstance(weight, Fp8)
    num_weights = _FOUR_BIT_WEIGHTS if has_four_bits else num_weights
    return {
        "BLOCK_N": num_weights // (num_matrices * depth),
        "BLOCK_D": depth // BLOCK,
        "BLOCK": BLOCK,
        "num_warps": 4 if has_four_bits else 8,
        **{name: known[name] for name in ("GROUP", "DEPTHS", "SCALE_ROWS", "NATIVE")},
    }


def run(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies by quantised weights, each row for itself."""
    hidden, weight, output, chip = given.values, given.weight, given.output(), given.chip
    assert isinstance(weight, Quantised), "the kernel's forms"
    is_small = weight.num_outputs * hidden.shape[1] < _SMALL
    cut = cut_up(weight, chip, FEW_WEIGHTS if is_small else WEIGHTS)
    _dense_kernel[(triton.cdiv(weight.num_outputs, cut["BLOCK_N"]), len(hidden))](
        hidden,
        *operands(weight, chip),
        given.bias,
        output,
        hidden.stride(0),
        output.stride(0),
        INPUTS=hidden.shape[1],
        OUTPUTS=weight.num_outputs,
        **cut,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _dense_kernel(
    hidden,
    weight,
    scales,
    zeros,
    bias,
    output,
    stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    column = o_n % OUTPUTS
    p_w = weight + column.to(tl.int64) * PITCH
    p_scale = scales + column // SCALE_ROWS * DEPTHS
    p_zero = None if zeros is None else zeros + column * (DEPTHS if GROUP > 0 else 1)
    b_w = load_weights(p_w, 0, INPUTS, BLOCK_D, BLOCK, GROUP)
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        if i_d > 0:
            b_w = load_weights(p_w, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        row = hidden + token * stride
        b_x, b_y, b_sum = load_row(row, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        acc += dot(
            b_w, b_x, b_y, b_sum, p_scale, p_zero, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE
        )
    if GROUP < 0:
        acc *= factors(p_zero)
    is_column = o_n < OUTPUTS
    if bias is not None:
        acc += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = acc.to(output.dtype.element_ty)
    tl.store(output + token * output_stride + o_n, b_o, mask=is_column)


@triton.jit
def load_row(
    p_x,
    i_d,
    INPUTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Returns a row's blocks from the i_d-th on as they are multiplied, [D, W] twice: the inputs of
    bytes' low and high halves for four bits, the same blocks for FP8; and sums or scales of blocks
    [D]."""
    WIDTH: tl.constexpr = BLOCK // 2 if GROUP else BLOCK
    o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, WIDTH)
    is_input = (o_d < INPUTS // BLOCK)[:, None]
    place = o_d[:, None] * BLOCK + o_k[None, :]
    b_x = tl.load(p_x + place, mask=is_input, other=0.0).to(tl.float32)
    if GROUP:
        b_y = tl.load(p_x + WIDTH + place, mask=is_input, other=0.0).to(tl.float32)
        b_sum = tl.sum(b_x + b_y, 1)
        # What depends on a sum is widened before it is spread over the outputs, not after.
        one = tl.where(b_sum == b_sum, 1.0, b_sum)[:, None]
        return b_x * one, b_y * one, b_sum
    else:
        scale = scale_of(b_x, 1)
        # Times its scale here, so that numbers are widened once and not for every output.
        b_x = widen(encode(b_x / scale[:, None], NATIVE), NATIVE) * scale[:, None]
        return b_x, b_x, scale


@triton.jit
def load_weights(
    p_w, i_d, INPUTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Returns blocks of weights [N, D, W] of rows at `p_w` [N]."""
    WIDTH: tl.constexpr = BLOCK // 2 if GROUP else BLOCK
    o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, WIDTH)
    place = (o_d[:, None] * WIDTH + o_k[None, :])[None, :, :]
    if INPUTS % (BLOCK_D * BLOCK) == 0:
        return tl.load(p_w[:, None, None] + place)
    else:
        is_input = (o_d < INPUTS // BLOCK)[None, :, None]
        return tl.load(p_w[:, None, None] + place, mask=is_input, other=0.0)


@triton.jit
def dot(
    b_w,
    b_x,
    b_y,
    b_sum,
    p_scale,
    p_zero,
    i_d,
    INPUTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Multiplies weights and a row, both from block `i_d` on: [N]. The weights' scales are at
    `p_scale` [N], zero points at `p_zero`."""
    o_d = i_d + tl.arange(0, BLOCK_D)
    is_input = (o_d < INPUTS // BLOCK)[None, :]
    if GROUP < 0:
        return _dot_fp4(b_w, b_x, b_y, p_scale, o_d, is_input, BLOCK, -GROUP)
    elif GROUP:
        place = (o_d * BLOCK // GROUP)[None, :]
        scale = tl.load(p_scale[:, None] + place, mask=is_input, other=0.0).to(tl.float32)
        zero = tl.load(p_zero[:, None] + place, mask=is_input, other=0).to(tl.float32)
        b_w = b_w.to(tl.int32)
        sums = tl.sum(_beside(b_w << 19) * b_x[None, :, :], 2)
        sums += tl.sum(_beside(b_w << 15) * b_y[None, :, :], 2)
        return tl.sum((16.0 * sums - (zero + 16.0) * b_sum[None, :]) * scale, 1)
    else:
        scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
        return tl.sum(tl.sum(widen(b_w, NATIVE) * b_x[None, :, :], 2) * scale, 1)


@triton.jit
def _beside(bits):
    """Returns 1 + q / 16 in float32, for numbers q in the highest bits of its fraction."""
    return ((bits & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _dot_fp4(b_w, b_x, b_y, p_scale, o_d, is_input, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    N: tl.constexpr = b_w.shape[0]
    D: tl.constexpr = b_w.shape[1]
    G: tl.constexpr = BLOCK // (2 * GROUP)
    o_g = o_d[:, None] * (2 * G) + tl.arange(0, G)[None, :]
    p_group, is_group = p_scale[:, None, None] + o_g[None, :, :], is_input[:, :, None]
    low_scale = tl.load(p_group, mask=is_group, other=0)
    high_scale = tl.load(p_group + G, mask=is_group, other=0)
    b_w = b_w.to(tl.int16)
    low = float4.numbers(b_w & 15, tl.float16).to(tl.float32) * b_x[None, :, :]
    high = float4.numbers(b_w >> 4, tl.float16).to(tl.float32) * b_y[None, :, :]
    sums = tl.sum(tl.reshape(low, [N, D, G, GROUP]), 3)
    sums *= float4.scales(low_scale, tl.float16)
    other = tl.sum(tl.reshape(high, [N, D, G, GROUP]), 3)
    sums += other * float4.scales(high_scale, tl.float16)
    return tl.sum(tl.sum(sums, 2), 1)
