"""Products of int4 experts with few tokens on Hopper, in Gluon: unpacking and multiplying in
registers.

Every thread reads just the bytes that it multiplies and unpacks them in registers. Weights are the
left operand. The product of a block, or of each group in it, is made of whole numbers, less their
zero point, then scaled and added up in float32. The order of inputs in a product does not matter as
long as both operands have the same, nor does the order of outputs: so a thread has 16 bytes side by
side, or twice 8 where groups are of 32 inputs.

Legend: N outputs of a part, M rows, K inputs of half a block.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from milepost.kernels.platform.gluon import release, thread_barrier, wait_loaded
from milepost.kernels.products.forms.quantised import BLOCK, lane_of
from milepost.kernels.products.hopper import int4_numbers as int4
from milepost.kernels.products.hopper.experts_loading import BLOCK_M

HALF = BLOCK // 2
_BLOCK, _HALF, _M = gl.constexpr(BLOCK), gl.constexpr(HALF), gl.constexpr(BLOCK_M)


PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))
_WARPS = [[16, 0], [32, 0]]
_NATURAL, _REVERSED = [[1, 0], [2, 0], [4, 0]], [[4, 0], [2, 0], [1, 0]]
_SAME = [[0, 0], [0, 0]]
_SCALED = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [8, 0]], [*_SAME, *_NATURAL], _WARPS, [], [HALF, 2])
)
"""Layout of words of scales [N, blocks of a step], as products have them."""


class HalvedShape(NamedTuple):
    """One projection; a constant on the device. The second part's weights are `apart` rows from the
    first one's; a row has `words` of scales, each of a block or of a `group` of several."""

    apart: int
    words: int
    group: int
    steps: int

    @property
    def lane(self) -> int:  # inputs of a product: see `Int4`
        return lane_of(self.group)


@gluon.constexpr_function
def halve_steps(num_inputs, group, apart):
    """Returns the shape of a projection. Half of its last step may lie past the inputs, where TMA
    fills in zeros."""
    num_steps = (num_inputs + 2 * BLOCK - 1) // (2 * BLOCK)
    return HalvedShape(apart, num_inputs // max(group, BLOCK), group, num_steps)


@gluon.constexpr_function
def _inputs_of(lane):
    """Returns a layout's bases of the inputs that a thread has, and of those by which four threads
    differ."""
    wide = lane if lane < HALF else 8
    return [[0, 1], [0, 2], [0, 4], [0, wide]], [[0, lane // 4], [0, lane // 2]]


@gluon.constexpr_function
def _weights_layout(lane):
    """Returns the layout of weights' bytes [N, K] as they are loaded: a thread has 16, of outputs
    chosen so that no two threads read the same bank."""
    inside, across = _inputs_of(lane)
    lanes = [*across, *_REVERSED]
    return gl.DistributedLinearLayout([*inside, [8, 0]], lanes, _WARPS, [], [HALF, HALF])


@gluon.constexpr_function
def _rows_layout(lane):
    """Returns the layout of rows [M, K] as they are loaded, chosen likewise."""
    inside, across = _inputs_of(lane)
    lanes = [*across, *(_NATURAL if lane == HALF else _REVERSED)]
    return gl.DistributedLinearLayout(inside, lanes, _SAME, [], [BLOCK_M, HALF])


@gluon.jit
def scales_of(scales, HALVES: gl.constexpr):
    """Returns pointers to words of scales and of zero points of the outputs [N, 1] of the first
    unit's first part, and the scales for their type."""
    EACH: gl.constexpr = int4.scales_each(HALVES.group)
    first = outputs_of(gl.SliceLayout(1, _SCALED))[:, None] * HALVES.words
    weights, zeros = int4.as_words(scales.weights, EACH), int4.as_words(scales.zeros, EACH)
    return weights + first, zeros + first, scales.weights


@gluon.jit
def load_scales(own, place, step, HALVES: gl.constexpr):
    """Loads words of scales and of zero points [N, blocks] of a step, by part."""
    WORDS: gl.constexpr = HALVES.words
    DEPTH: gl.constexpr = max(HALVES.group, _BLOCK)
    block = 2 * step + gl.arange(0, 2, gl.SliceLayout(0, _SCALED))[None, :]
    # In this form the compiler loads both blocks' at once.
    word = block if DEPTH == _BLOCK else block * _BLOCK // DEPTH
    if WORDS * DEPTH % (2 * _BLOCK) != 0:
        word = gl.minimum(word, WORDS - 1)
    scales, zeros = (), ()
    for part in gl.static_range(2):
        at = place + part * HALVES.apart * WORDS + word
        scales += (gl.load(own[0] + at),)
        zeros += (gl.load(own[1] + at),)
    return scales, zeros


@gluon.jit
def multiply(stages, held, own, place, next_place, number, HALVES: gl.constexpr):
    """Returns both parts' products [N, M] of a unit, and the scales of the next unit's first step.
    `held` are the scales of this unit's first step, which is the program's step `number`."""
    first = gl.zeros([_HALF, _M], gl.float32, PRODUCTS)
    second = gl.zeros([_HALF, _M], gl.float32, PRODUCTS)
    # Registers have room for words of four scales for three blocks, not for four.
    IS_EARLY: gl.constexpr = int4.scales_each(HALVES.group) < 4
    TYPE: gl.constexpr = own[2].dtype.element_ty
    for step in range(HALVES.steps):
        is_last = step == HALVES.steps - 1
        later = gl.where(is_last, next_place, place)
        next_step = gl.where(is_last, 0, step + 1)
        if IS_EARLY:
            next_held = load_scales(own, later, next_step, HALVES)
        first_scales, second_scales = _split(held[0][0], PRODUCTS), _split(held[0][1], PRODUCTS)
        first_zeros, second_zeros = _split(held[1][0], _LEFT), _split(held[1][1], _LEFT)
        stage = wait_loaded(stages.bars, number)
        for b in gl.static_range(2):
            if b == 1 and not IS_EARLY:
                next_held = load_scales(own, later, next_step, HALVES)
            rows = _load_rows(stages.inputs, 4 * stage + 2 * b, HALVES)
            left = stages.weights.index(2 * stage).slice(b * _HALF, _HALF, 1)
            right = stages.weights.index(2 * stage + 1).slice(b * _HALF, _HALF, 1)
            scale, zero = first_scales[b], first_zeros[b]
            first = _add_block(first, left, rows, scale, zero, TYPE, HALVES)
            scale, zero = second_scales[b], second_zeros[b]
            second = _add_block(second, right, rows, scale, zero, TYPE, HALVES)
        if not IS_EARLY:
            # The last reads of the stage queue up until late loads of scales are served. The
            # barrier does not wait for reads, so TMA would overwrite what is still to be read.
            fence_async_shared()
        thread_barrier()
        release(stages.bars, stage)
        number += 1
        held = next_held
    return first, second, held


@gluon.jit
def _split(values, LAYOUT: gl.constexpr):
    """Splits values into those of each block [N]."""
    first, second = gl.split(values)
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    first = gl.convert_layout(first, OUTPUTS, assert_trivial=True)
    return first, gl.convert_layout(second, OUTPUTS, assert_trivial=True)


@gluon.jit
def _load_rows(inputs, first, HALVES: gl.constexpr):
    """Loads a block's rows [K, M] in pieces, as they are multiplied: those inputs that are in low
    halves of bytes, then those in high ones, and with short lanes the same again."""
    LANE: gl.constexpr = HALVES.lane
    pieces = ()
    for half in gl.static_range(2):
        b_x = inputs.index(first + half).load(_rows_layout(LANE))
        if LANE != _HALF:
            b_x = _reverse(b_x)
        parts = _in_turn(b_x, LANE)
        for i in gl.static_range(len(parts)):
            pieces += (gl.convert_layout(parts[i].permute((1, 0)), _RIGHT, assert_trivial=True),)
    return pieces


@gluon.jit
def _in_turn(values, LANE: gl.constexpr):
    """Puts inputs in the order in which both operands are multiplied: a thread has 4 adjacent ones
    in a product. Returns pieces of a lane each."""
    HEIGHT: gl.constexpr = values.shape[0]
    parts = gl.reshape(values, [HEIGHT, _HALF // LANE, 4, LANE // 16, 2, 2])
    values = gl.reshape(gl.permute(parts, (0, 1, 3, 4, 2, 5)), [HEIGHT, _HALF])
    return (values,) if LANE == _HALF else int4.halve(values)


@gluon.jit
def _reverse(values):
    """Orders lines as `reversed_of` says."""
    HEIGHT: gl.constexpr = values.shape[0]
    parts = gl.reshape(values, [HEIGHT // 8, 2, 2, 2, _HALF])
    return gl.reshape(gl.permute(parts, (0, 3, 2, 1, 4)), [HEIGHT, _HALF])


@gluon.jit
def reversed_of(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the line that stands in each place: its last three bits are reversed."""
    at = gl.arange(0, SIZE, LAYOUT)
    return (at & -8) + (at & 1) * 4 + (at & 2) + (at // 4 & 1)


@gluon.jit
def outputs_of(LAYOUT: gl.constexpr):
    """Returns the output of each row of products [N]."""
    return reversed_of(_HALF, LAYOUT)


@gluon.jit
def rows_of(LAYOUT: gl.constexpr, HALVES: gl.constexpr):
    """Returns the token's row of each column of products [M]."""
    if HALVES.lane == _HALF:
        return gl.arange(0, _M, LAYOUT)
    else:
        return reversed_of(_M, LAYOUT)


@gluon.jit
def _add_block(result, numbers, rows, scales, zeros, TYPE: gl.constexpr, HALVES: gl.constexpr):
    """Adds a block's product to `result`. `scales` and `zeros` are words, scales of a TYPE."""
    LANE: gl.constexpr = HALVES.lane
    EACH: gl.constexpr = int4.scales_each(HALVES.group)
    PIECES: gl.constexpr = _BLOCK // LANE
    dtype: gl.constexpr = rows[0].dtype
    low, high = int4.unpack(numbers.load(_weights_layout(LANE)), dtype)
    low, high = _in_turn(_reverse(low), LANE), _in_turn(_reverse(high), LANE)
    product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    for i in gl.static_range(PIECES):
        left = gl.convert_layout((low, high)[i % 2][i // 2], _LEFT, assert_trivial=True)
        left -= int4.zero_of(zeros, i * EACH // PIECES, dtype)[:, None]
        product = mma_v2(left, rows[i], product)
        if EACH == PIECES or i == PIECES - 1:
            scale = int4.scale_of(scales, i * EACH // PIECES, TYPE).to(gl.float32)
            result += product * scale[:, None]
            product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    return result
