"""Loading of `experts` on Hopper, in Gluon: the units that a program takes, and their steps.

Legend: M rows of a block, I an expert's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import load_box, wait_free
from milepost.kernels.products.forms.quantised import BLOCK

BLOCK_M = 8
_M, _BLOCK = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK)


class MixtureBoxes(NamedTuple):
    """TMA descriptors of a projection's rows, their scales (or None) and weights."""

    rows: Any
    row_scales: Any
    weight: Any


@gluon.jit
def produce(stages, lists, up, down, SHAPE: gl.constexpr):
    """Loads every step as soon as there is room, first of the up projection, then of the down
    projection, whose rows may have to be waited for."""
    TILES: gl.constexpr = SHAPE.tiles
    COLUMNS: gl.constexpr = SHAPE.columns
    HEIGHT: gl.constexpr = 2 * SHAPE.size if SHAPE.is_gated else SHAPE.size
    owners, num_blocks = lists.experts, gl.load(lists.count)
    num_units, stride = num_blocks * TILES, gl.num_programs(0)
    # The next expert is looked up a unit ahead: a unit has few steps, and would begin with waiting.
    expert = gl.load(owners + gl.minimum(gl.program_id(0) // TILES, num_blocks - 1))
    number = 0
    for unit in range(gl.program_id(0), num_units, stride):
        next_expert = gl.load(owners + gl.minimum(unit + stride, num_units - 1) // TILES)
        row = expert * HEIGHT + unit % TILES * SHAPE.wide
        number = _load_up(stages, up, row, unit // TILES * _M, number, SHAPE)
        expert = next_expert
    share, num_units = share_down(num_blocks, SHAPE)
    expert = gl.load(owners + find_place(0, share, num_blocks, SHAPE))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, share, num_blocks, SHAPE))
        unit = find_down(index, share)
        row = expert * SHAPE.inputs + unit % COLUMNS * (SHAPE.inputs // COLUMNS)
        place = unit // COLUMNS
        counter, first = lists.counters + place, place * _M
        number = _load_down(stages, down, row, first, number, counter, SHAPE)
        expert = next_expert


@gluon.jit
def _load_up(stages, boxes, row, first, number, SHAPE: gl.constexpr):
    """Loads a unit of the up projection, whose weights begin at `row` and whose rows at `first`;
    returns the number of the next step."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    APART: gl.constexpr = SHAPE.size if SHAPE.is_gated else boxes.weight.block_type.shape[0]
    for box in range(0, SHAPE.up_boxes, BLOCKS):
        for part in gl.static_range(BLOCKS):
            stage = _load_weights(stages, boxes, row, APART, part, box, number, SHAPE)
            _load_rows(stages, boxes, first, box, stage, SHAPE)
            number += 1
    return number


@gluon.jit
def _load_down(stages, boxes, row, first, number, counter, SHAPE: gl.constexpr):
    """Loads a unit of the down projection, its rows once `counter` says that they are complete."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    APART: gl.constexpr = boxes.weight.block_type.shape[0]
    for part in gl.static_range(BLOCKS):
        for box in range(0, SHAPE.down_boxes, BLOCKS):
            stage = _load_weights(stages, boxes, row, APART, part, box, number, SHAPE)
            if box + part == 0:
                wait_for(counter, SHAPE.tiles)
            _load_rows(stages, boxes, first, box, stage, SHAPE)
            number += 1
    return number


@gluon.jit
def _load_weights(stages, boxes, row, APART: gl.constexpr, part, box, number, SHAPE: gl.constexpr):
    """Loads two boxes of weights once their stage is free: of both parts, which are APART, or two
    of one part. Returns the stage."""
    HEIGHT: gl.constexpr = boxes.weight.block_type.shape[0]
    stage = wait_free(stages.bars, number)
    bar = stages.bars.index(stage)
    mbarrier.expect(bar, 2 * HEIGHT * _BLOCK)
    for i in gl.static_range(2):
        at = [row + i * APART, box * _BLOCK]
        if SHAPE.blocks == 2:
            at = [row + part * APART, (box + i) * _BLOCK]
        load_box(boxes.weight, at, bar, stages.weights.index(2 * stage + i))
    return stage


@gluon.jit
def _load_rows(stages, boxes, first, box, stage, SHAPE: gl.constexpr):
    """Loads a step of the rows from `first` on, and their scales if they have any."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    DEPTH: gl.constexpr = SHAPE.depth
    WIDTH: gl.constexpr = boxes.rows.block_type.shape[1]
    PIECES: gl.constexpr = BLOCKS * DEPTH // WIDTH
    LINE: gl.constexpr = BLOCKS * DEPTH * boxes.rows.dtype.primitive_bitwidth // 8
    bar = stages.bars.index(stage)
    mbarrier.expect(bar, _M * (LINE if boxes.row_scales is None else LINE + 4 * BLOCKS))
    for i in gl.static_range(PIECES):
        place = stages.inputs.index(PIECES * stage + i)
        load_box(boxes.rows, [first, box * DEPTH + i * WIDTH], bar, place)
        if boxes.row_scales is not None:
            held = stages.row_scales.index(PIECES * stage + i)
            load_box(boxes.row_scales, [box + i, first], bar, held)


@gluon.jit
def fence_async():
    """Makes writes of this thread, and those that it has observed, visible to TMA."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for(counter, value: gl.constexpr):
    """Waits until a counter that other programs increase has reached `value`."""
    count = _read(counter)
    while count < value:
        count = _read(counter)
    fence_async()


@gluon.jit
def _read(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def share_down(num_blocks, SHAPE: gl.constexpr):
    """Returns a program's share of the down projection, for `find_down`, and its number of units.

    Units of the up projection are dealt to the programs in turn, so some programs have one less
    than others. These first get as much work of the down projection instead, RATIO units. The rest
    is dealt to all programs in turn."""
    RATIO: gl.constexpr = SHAPE.inputs // SHAPE.size
    program, stride = gl.program_id(0), gl.num_programs(0)
    num_units = num_blocks * SHAPE.columns
    num_long = num_blocks * SHAPE.tiles % stride
    is_short = (num_long > 0) & (program >= num_long)
    num_short = stride - num_long
    num_owed = gl.where(num_long > 0, gl.minimum(num_short * RATIO, num_units), 0)
    first = gl.where(is_short, program - num_long, 0)
    num_own = gl.where(is_short, (num_owed - first + num_short - 1) // num_short, 0)
    num_common = gl.maximum(num_units - num_owed - program + stride - 1, 0) // stride
    return (first, num_short, num_own, num_owed + program), num_own + num_common


@gluon.jit
def find_down(index, share):
    """Returns the unit of the down projection that a program takes as its `index`-th."""
    first, num_short, num_own, first_common = share
    common = first_common + (index - num_own) * gl.num_programs(0)
    return gl.where(index < num_own, first + index * num_short, common)


@gluon.jit
def find_place(index, share, num_blocks, SHAPE: gl.constexpr):
    """Returns the block of rows of a program's `index`-th unit; past the last unit, the last
    block."""
    return gl.minimum(find_down(index, share) // SHAPE.columns, num_blocks - 1)
