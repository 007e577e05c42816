"""Triton: matrix-vector products of quantised weights, dense ones and those of experts, for so few
rows that reading the weights is what costs.

Every program rounds its row on the way where the form asks for that: it needs no launch of its own.
A row's blocks have BLOCK inputs; of four bits a weight's number stands in a float32's bits beside
1, and what that adds is taken off a block's sum.

Legend: T tokens, I inputs, O outputs, N experts of a token, P = T * N routed tokens, D blocks of a
step, W numbers or bytes of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import Chip
from milepost.kernels.moe.activation import activate
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Int4, Quantised
from milepost.kernels.quantised.triton_rounding import scale_of, widen
from milepost.kernels.quantised.triton_step import constants, operands
from milepost.kernels.triton_float8 import encode

_WEIGHTS, _FEW_WEIGHTS = 1 << 15, 1 << 14
"""That a program reads at a time: the more, the less it matters that each rounds its row. Fewer of
experts' last projections and of small matrices, so that there are programs enough."""
_SMALL = 1 << 24
"""Weights of a small matrix."""
_INT4_WEIGHTS = 1 << 13
"""Of four bits: a row is not rounded, and numbers take work that more programs share."""
_DEPTH = 2048
"""Inputs of a step."""


def suits(*weights: Quantised) -> bool:
    """FP8 whose rows are rounded in blocks by their own size; four bits whose groups are whole
    blocks."""
    return all(
        weight.group % BLOCK == 0
        if isinstance(weight, Int4)
        else weight.depth == BLOCK and weight.input_scale is None
        for weight in weights
    )


def _cut(weight: Quantised, chip: Chip, num_weights: int, num_matrices: int = 1) -> dict[str, int]:
    """Outputs and blocks of inputs of a step, and the weight's constants."""
    depth = min(triton.next_power_of_2(weight.num_inputs), _DEPTH)
    known, is_int4 = constants(weight, chip), isinstance(weight, Int4)
    num_weights = _INT4_WEIGHTS if is_int4 else num_weights
    return {
        "BLOCK_N": num_weights // (num_matrices * depth),
        "BLOCK_D": depth // BLOCK,
        "BLOCK": BLOCK,
        "num_warps": 4 if is_int4 else 8,
        **{name: known[name] for name in ("GROUP", "DEPTHS", "SCALE_ROWS", "NATIVE")},
    }


@triton.jit
def _load_row(
    p_x,
    i_d,
    INPUTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A row's blocks from the i_d-th on as they are multiplied, [D, W] twice: of four bits the
    inputs of bytes' low and high halves, of FP8 the same; and sums or scales of blocks [D]."""
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
def _load_weights(
    p_w, i_d, INPUTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Blocks of weights [N, D, W] of rows at `p_w` [N]."""
    WIDTH: tl.constexpr = BLOCK // 2 if GROUP else BLOCK
    o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, WIDTH)
    place = (o_d[:, None] * WIDTH + o_k[None, :])[None, :, :]
    if INPUTS % (BLOCK_D * BLOCK) == 0:
        return tl.load(p_w[:, None, None] + place)
    else:
        is_input = (o_d < INPUTS // BLOCK)[None, :, None]
        return tl.load(p_w[:, None, None] + place, mask=is_input, other=0.0)


@triton.jit
def _dot(
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
    """Products [N] of weights and a row, both of `i_d`; the weights' scales are at `p_scale` [N],
    zero points at `p_zero`."""
    o_d = i_d + tl.arange(0, BLOCK_D)
    is_input = (o_d < INPUTS // BLOCK)[None, :]
    if GROUP:
        place = (o_d * BLOCK // GROUP)[None, :]
        scale = tl.load(p_scale[:, None] + place, mask=is_input, other=0.0).to(tl.float32)
        zero = tl.load(p_zero[:, None] + place, mask=is_input, other=0).to(tl.float32)
        b_w = b_w.to(tl.int32)
        sums = tl.sum(_beside(b_w << 19) * b_x[None, :, :], 2)
        sums += tl.sum(_beside(b_w << 15) * b_y[None, :, :], 2)
        sums = 16.0 * sums - (zero + 16.0) * b_sum[None, :]
    else:
        scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
        sums = tl.sum(widen(b_w, NATIVE) * b_x[None, :, :], 2)
    return tl.sum(sums * scale, 1)


@triton.jit
def _beside(bits):
    """1 + q / 16 in float32, of numbers q in the highest bits of its fraction."""
    return ((bits & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)


def multiply(
    hidden: Tensor, weight: Quantised, bias: Tensor | None, output: Tensor, chip: Chip
) -> None:
    """`output` [T, O]: `hidden` [T, I] times `weight` [O, I], plus `bias` [O]."""
    num_tokens, num_inputs = hidden.shape
    num_outputs = output.shape[1]
    is_small = num_outputs * num_inputs < _SMALL
    cut = _cut(weight, chip, _FEW_WEIGHTS if is_small else _WEIGHTS)
    _dense_kernel[(triton.cdiv(num_outputs, cut["BLOCK_N"]), num_tokens)](
        hidden,
        *operands(weight, chip),
        bias,
        output,
        hidden.stride(0),
        output.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        **cut,
        **OVERLAPPED,
    )


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
    let_next_start()
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    column = o_n % OUTPUTS
    p_w = weight + column.to(tl.int64) * PITCH
    p_scale = scales + column // SCALE_ROWS * DEPTHS
    p_zero = None if zeros is None else zeros + column * DEPTHS
    b_w = _load_weights(p_w, 0, INPUTS, BLOCK_D, BLOCK, GROUP)
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        if i_d > 0:
            b_w = _load_weights(p_w, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        row = hidden + token * stride
        b_x, b_y, b_sum = _load_row(row, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        acc += _dot(
            b_w, b_x, b_y, b_sum, p_scale, p_zero, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE
        )
    is_column = o_n < OUTPUTS
    if bias is not None:
        acc += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = acc.to(output.dtype.element_ty)
    tl.store(output + token * output_stride + o_n, b_o, mask=is_column)


def project_up(
    hidden: Tensor, experts: Tensor, up: Quantised, active: Tensor, chip: Chip, *, is_gated: bool
) -> None:
    """`active` [P, I]: what `up` [X, 2 * I, H] and SwiGLU make of the routed tokens' `hidden`
    [T, H], or `up` [X, I, H] and the square of a ReLU."""
    size, num_inputs = active.shape[1], hidden.shape[1]
    cut = _cut(up, chip, _WEIGHTS, 1 + is_gated)
    _up_kernel[(triton.cdiv(size, cut["BLOCK_N"]), experts.numel())](
        hidden,
        experts,
        *operands(up, chip),
        active,
        hidden.stride(0),
        TOP_K=experts.shape[1],
        INPUTS=num_inputs,
        SIZE=size,
        GATED=is_gated,
        **cut,
        **OVERLAPPED,
    )


@triton.jit
def _up_kernel(
    hidden,
    experts,
    up,
    scales,
    zeros,
    active,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Up rows stand behind the gates'.
    gate_row = o_n % SIZE
    up_row = gate_row + (ROWS - SIZE)
    row = hidden + (routed // TOP_K).to(tl.int64) * stride
    own = up + expert * (ROWS * PITCH)
    first_scale = expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    gate_scale = first_scale + gate_row // SCALE_ROWS * DEPTHS
    up_scale = first_scale + up_row // SCALE_ROWS * DEPTHS
    p_gate_zero = None if zeros is None else zeros + gate_scale
    p_up_zero = None if zeros is None else zeros + up_scale
    gates = tl.zeros([BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        b_up = _load_weights(own + up_row * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        if GATED:
            b_gate = _load_weights(own + gate_row * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        b_x, b_y, b_sum = _load_row(row, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        if GATED:
            gates += _dot(
                b_gate, b_x, b_y, b_sum, scales + gate_scale, p_gate_zero, i_d,
                INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
            )  # fmt: skip
        ups += _dot(
            b_up, b_x, b_y, b_sum, scales + up_scale, p_up_zero, i_d,
            INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
        )  # fmt: skip
    b_o = activate(ups, gates, GATED).to(active.dtype.element_ty)
    tl.store(active + routed * SIZE + o_n, b_o, mask=o_n < SIZE)


def project_down(
    active: Tensor, shares: Tensor, experts: Tensor, down: Quantised, partials: Tensor, chip: Chip
) -> None:
    """`partials` [P, H]: `shares` [P] times `active` [P, I] through `down` [X, H, I]."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    cut = _cut(down, chip, _FEW_WEIGHTS)
    _down_kernel[(triton.cdiv(num_outputs, cut["BLOCK_N"]), experts.numel())](
        active,
        shares,
        experts,
        *operands(down, chip),
        partials,
        SIZE=size,
        OUTPUTS=num_outputs,
        **cut,
        **OVERLAPPED,
    )


@triton.jit
def _down_kernel(
    active,
    shares,
    experts,
    down,
    scales,
    zeros,
    partials,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    PITCH: tl.constexpr = SIZE // 2 if GROUP else SIZE
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    share = tl.load(shares + routed).to(tl.float32)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = o_n % OUTPUTS
    p_w = down + expert * (OUTPUTS * PITCH) + column * PITCH
    own_scale = expert * ((OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    own_scale += column // SCALE_ROWS * DEPTHS
    p_zero = None if zeros is None else zeros + own_scale
    row = active + routed * SIZE
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, SIZE // BLOCK, BLOCK_D):
        b_w = _load_weights(p_w, i_d, SIZE, BLOCK_D, BLOCK, GROUP)
        b_x, b_y, b_sum = _load_row(row, i_d, SIZE, BLOCK_D, BLOCK, GROUP, NATIVE)
        acc += _dot(
            b_w, b_x, b_y, b_sum, scales + own_scale, p_zero, i_d,
            SIZE, BLOCK_D, BLOCK, GROUP, NATIVE,
        )  # fmt: skip
    b_o = (acc * share).to(partials.dtype.element_ty)
    tl.store(partials + routed.to(tl.int64) * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
