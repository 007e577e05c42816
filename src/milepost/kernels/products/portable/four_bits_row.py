"""Triton: multiplies a row by four-bit weights, without tensor cores.

A thread multiplies the bytes that it loads at once, a piece, and scales their sum: no thread waits
for another before all inputs are done. It does so for several outputs, whose pieces meet the same
inputs: these are loaded and widened once, by the thread itself, since in shapes pieces stand before
outputs and a warp has one for each thread. Whole numbers stand in a float32's bits beside 128, and
the surplus is taken off a piece's sum with the zero point.

Legend: N outputs, P pieces of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.products.forms.quantised import BLOCK, FP4_LANE
from milepost.kernels.products.portable import four_bits
from milepost.kernels.products.portable.weights import lane

_LANES = 32
"""Threads of a warp, at least, that have a piece of the same output."""
_MOST_BYTES = 16
"""Bytes of a piece, at most: what a thread loads at once."""
_BLOCK = tl.constexpr(BLOCK)
_LANE = tl.constexpr(FP4_LANE)


@triton.constexpr_function
def _piece(block_k):
    """Returns the bytes of a piece: a warp has one each of an output's step, as it has of the
    row's."""
    return min(block_k // (2 * _LANES), _MOST_BYTES)


@triton.constexpr_function
def num_pieces(block_k):
    """Returns the number of pieces of a step."""
    return block_k // (2 * _piece(block_k))


@triton.jit
def _pieces(i_k, SHAPE: tl.constexpr):
    """Returns a step's pieces [P]: their numbers, the first inputs of their low halves, and whether
    they exist."""
    LANE: tl.constexpr = lane(SHAPE.group)
    PIECE: tl.constexpr = _piece(SHAPE.block_k)
    EACH: tl.constexpr = LANE // PIECE
    o_p = i_k // (2 * PIECE) + tl.arange(0, num_pieces(SHAPE.block_k))
    o_k = o_p // EACH * (2 * LANE) + o_p % EACH * PIECE
    return o_p, o_k, o_k < SHAPE.inputs


@triton.jit
def load_row(p_x, i_k, SHAPE: tl.constexpr):
    """Loads the inputs of the pieces' low and high halves [P, PIECE], and returns their sums [P]
    too."""
    LANE: tl.constexpr = lane(SHAPE.group)
    _, o_k, is_input = _pieces(i_k, SHAPE)
    b_x = _load_inputs(p_x, o_k, is_input, _piece(SHAPE.block_k))
    b_y = _load_inputs(p_x + LANE, o_k, is_input, _piece(SHAPE.block_k))
    if SHAPE.group < 0:
        factor = four_bits.row_factor(SHAPE.has_ptx)
        return b_x * factor, b_y * factor, 0.0, 0.0
    else:
        return b_x, b_y, tl.sum(b_x, 1), tl.sum(b_y, 1)


@triton.jit
def _load_inputs(p_x, o_k, is_input, PIECE: tl.constexpr):
    """Returns inputs from `o_k` [P] on, [P, PIECE], in the threads that have their weights: loaded
    at once, 16 of them would be two threads'."""
    COUNT: tl.constexpr = min(PIECE, 8)
    p_x += o_k[:, None] + tl.arange(0, COUNT)[None, :]
    b_x = tl.load(p_x, mask=is_input[:, None], other=0.0)
    if PIECE > COUNT:
        second = tl.load(p_x + COUNT, mask=is_input[:, None], other=0.0)
        both = tl.permute(tl.join(b_x, second), (0, 2, 1))
        b_x = tl.reshape(both, [o_k.shape[0], PIECE])
    return b_x.to(tl.float32)


@triton.jit
def load_weights(p_row, i_k, SHAPE: tl.constexpr):
    """Loads pieces of weights [P, N, PIECE] of rows from `find_row`, and two tensors [P, N] that
    scale them. For integers these are scales and zero points, packed for two neighbouring groups if
    a byte's halves are in different groups; for e2m1, the scales of the low and of the high
    halves."""
    o_p, o_k, is_input = _pieces(i_k, SHAPE)
    PIECE: tl.constexpr = _piece(SHAPE.block_k)
    place = o_p[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    p_w = p_row[0][None, :, None] + place[:, None, :]
    GROUP: tl.constexpr = SHAPE.group if SHAPE.group > 0 else -SHAPE.group
    o_g = (o_k // GROUP)[:, None]
    p_first = p_row[1][None, :] + o_g
    if SHAPE.group < 0:
        p_second = p_first + _LANE // GROUP
    else:
        p_second = p_row[2][None, :] + o_g
        if SHAPE.group < _BLOCK:
            p_first = p_first.to(tl.pointer_type(tl.int32), bitcast=True)
            p_second = p_second.to(tl.pointer_type(tl.uint16), bitcast=True)
    if SHAPE.inputs % SHAPE.block_k == 0:
        return tl.load(p_w), tl.load(p_first), tl.load(p_second)
    else:
        b_w = tl.load(p_w, mask=is_input[:, None, None], other=0)
        first = tl.load(p_first, mask=is_input[:, None], other=0)
        return b_w, first, tl.load(p_second, mask=is_input[:, None], other=0)


@triton.jit
def dot(weights, x, TYPE: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies pieces of weights by pieces of a row: [P, N]. Packed scales have the type TYPE."""
    b_w, first, second = weights
    b_x, b_y, x_sum, y_sum = x
    low, high = four_bits.widen(b_w, SHAPE)
    low, high = tl.sum(low * b_x[:, None, :], 2), tl.sum(high * b_y[:, None, :], 2)
    if SHAPE.group < 0:
        return low * four_bits.wide_scales(first) + high * four_bits.wide_scales(second)
    elif SHAPE.group < _BLOCK:
        low = (low - _surplus(second & 255) * x_sum[:, None]) * _take(first, TYPE)
        return low + (high - _surplus(second >> 8) * y_sum[:, None]) * _take(first >> 16, TYPE)
    else:
        return (low + high - _surplus(second) * (x_sum + y_sum)[:, None]) * first.to(tl.float32)


@triton.jit
def _surplus(zero):
    """Returns the surplus of an unpacked integer: its zero point plus 128."""
    # Small numbers beside 2 ** 23 cost less than a conversion.
    return (zero.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - 128.0)


@triton.jit
def _take(pair, TYPE: tl.constexpr):
    """Returns the low half of a 32-bit pair, a number of a 16-bit TYPE, in float32."""
    return (pair & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
