"""Experts' GEMMs for many rows on Hopper, in Gluon. This is the frame; `fp8_grouped` and
`int4_grouped` fill it in.

Some warps load steps to shared memory, two groups of four multiply them. The up projection's rows
are gathered by four warps, the down projection's rows and all weights are loaded by TMA. A form
says how rows are gathered and how a tile is multiplied: gates and ups, or two blocks of outputs.

Legend: T tokens, N experts of a token, H hidden size, D scales of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import boxes_of, load_box, thread_barrier, wait_free
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.hopper.experts import ExpertScales
from milepost.kernels.products.portable.grouped import ExpertRows, RowGroups
from milepost.kernels.products.run import RoutedRows

_REGISTERS = 168
"""Registers per thread, before multiplying and loading threads divide them."""
_BOX_ROWS, _LINE_BYTES = 64, 128
"""Rows of a box, and bytes of a row in it: the widest that TMA swizzles."""
_BLOCK = gl.constexpr(BLOCK)


class GroupedStages(NamedTuple):
    """A ring in shared memory: inputs [2 * STAGES, ...], halves of the rows in FP8 and of a step in
    int4, weights [PARTS * STAGES, BLOCK, ...], and barriers."""

    inputs: Any
    weights: Any
    bars: Any


class GroupedWork(NamedTuple):
    """Tiles of blocks of rows, shared out between programs. Strides are elements between rows,
    between lines of scales [D, rows] of the rows and of the output, and between lines of
    `Groups.blocks`. Launches take them one by one: within a tuple Triton would compile anew for
    multiples of 16."""

    groups: Any
    row_stride: Any
    scale_stride: Any
    output_stride: Any
    capacity: Any
    num_tiles: Any


class GroupedForm(NamedTuple):
    """Differences between forms of weights: device functions that allocate stages, point to a
    block's rows, copy a step of them, and compute all tiles."""

    open: Any
    find_rows: Any
    copy_rows: Any
    consume: Any


class ProjectionShape(NamedTuple):
    """A projection and its tiles; a constant on the device. An expert's weights have `height` rows;
    a tile's second part is `apart` rows from its first, and the next tile `wide`. The output has
    `outputs` columns, a block of rows `tiles`. Four bits share scales in a `group` of inputs. FP8
    rows were `is_bfloat` before rounding, and have room for a whole block if `is_padded`."""

    top_k: int
    parts: int
    height: int
    apart: int
    wide: int
    outputs: int
    tiles: int
    steps: int
    group: int
    block_m: int
    stages: int
    is_up: bool
    is_gated: bool
    is_padded: bool
    is_bfloat: bool
    limit: float

    @staticmethod
    def of(weight: Any, outputs: int, parts: int, **how: Any) -> ProjectionShape:
        is_gated = weight.num_outputs == 2 * outputs
        wide = BLOCK if is_gated else parts * BLOCK
        return ProjectionShape(
            parts=parts,
            height=weight.num_outputs,
            apart=outputs if is_gated else BLOCK,
            wide=wide,
            outputs=outputs,
            tiles=outputs // wide,
            steps=weight.num_inputs // BLOCK,
            group=getattr(weight, "group", 0),
            is_gated=is_gated,
            **how,
        )

    @property
    def loads(self) -> int:  # arrivals that make a step complete; gathered rows have their own
        return 2 if self.is_up else 1


def run(
    routed: RoutedRows,
    groups: Groups,
    rows: ExpertRows,
    active: ExpertRows,
    weights: tuple[TensorDescriptor, TensorDescriptor],
    parts: tuple[int, int],
    form: GroupedForm,
    **how: float,
) -> Tensor:
    """Returns partials [T, N, H] of `rows`. `active` takes the up projection's outputs; `weights`
    are the boxes of a part and a step, and `parts` the numbers of parts of a tile, in both
    projections."""
    output = routed.new_output(routed.experts.shape[1])
    how |= {"is_bfloat": output.dtype == torch.bfloat16, "is_padded": active.scales is not None}
    how["limit"] = routed.limit
    top_k, size, num_outputs = routed.experts.shape[1], routed.size, output.shape[-1]
    up = ProjectionShape.of(routed.up, size, parts[0], top_k=top_k, is_up=True, **how)
    down = ProjectionShape.of(routed.down, num_outputs, parts[1], top_k=1, is_up=False, **how)
    made = ExpertRows(output, routing_weights=routed.routing_weights)
    # Rows are gathered in the up projection, and read in boxes, block by block, in the other.
    boxes = boxes_of(active.base, _BOX_ROWS, _LINE_BYTES // active.base.itemsize)
    first = rows.base, routed.up, rows, active, up
    second = boxes, routed.down, active, made, down
    for box, (base, weight, given, taken, shape) in zip(weights, (first, second), strict=True):
        _project_kernel[(routed.chip.num_sms,)](
            base,
            box,
            ExpertScales.of(weight, given.scales),
            taken,
            RowGroups(groups.order, groups.blocks, groups.num_blocks),
            given.base.stride(0) if shape.is_up else 0,
            0 if given.scales is None else given.scales.stride(0),
            0 if taken.scales is None else taken.scales.stride(0),
            groups.blocks.shape[1],
            SHAPE=shape,
            OPEN=form.open,
            FIND=form.find_rows,
            COPY=form.copy_rows,
            CONSUME=form.consume,
            num_warps=4,
            maxnreg=_REGISTERS,
            **OVERLAPPED,
        )
    return output


@quick
@gluon.jit(do_not_specialize=["scale_stride", "output_stride", "capacity"])
def _project_kernel(
    rows,
    weight,
    scales,
    output,
    groups,
    row_stride,
    scale_stride,
    output_stride,
    capacity,
    SHAPE: gl.constexpr,
    OPEN: gl.constexpr,
    FIND: gl.constexpr,
    COPY: gl.constexpr,
    CONSUME: gl.constexpr,
):
    """Computes one projection; each program takes every n-th tile."""
    stages = OPEN(output.base.dtype.element_ty, weight, SHAPE)
    wait_for_inputs()
    launch_dependents()
    num_tiles = gl.load(groups.num_blocks) * SHAPE.tiles
    work = GroupedWork(groups, row_stride, scale_stride, output_stride, capacity, num_tiles)
    gl.warp_specialize(
        [
            (_consume, (CONSUME, stages, work, scales, output, 0, SHAPE)),
            (_consume, (CONSUME, stages, work, scales, output, 1, SHAPE)),
            (_produce, (FIND, COPY, stages, work, rows, weight, SHAPE)),
        ],
        [4, 4 if SHAPE.is_up else 1],
        [224, 56] if SHAPE.is_up else [240, 24],
    )


@gluon.jit
def _consume(
    CONSUME: gl.constexpr, stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr
):
    CONSUME(stages, work, scales, output, OWN, SHAPE)


@gluon.jit
def find_block(work, block):
    """Returns a block's expert, first row and end of the expert's rows."""
    blocks, capacity = work.groups.blocks, work.capacity
    expert = gl.load(blocks + block)
    return expert, gl.load(blocks + capacity + block), gl.load(blocks + 2 * capacity + block)


@gluon.jit
def _produce(
    FIND: gl.constexpr, COPY: gl.constexpr, stages, work, rows, weight, SHAPE: gl.constexpr
):
    """Loads every step of every tile as soon as there is room. TMA signals its own copies alone, so
    those of gathered rows are waited for, and signalled, a step later."""
    STAGES: gl.constexpr = SHAPE.stages
    bars, number = stages.bars, 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        block = index // SHAPE.tiles
        expert, first_row, end = find_block(work, block)
        row = expert * SHAPE.height + index % SHAPE.tiles * SHAPE.wide
        if SHAPE.is_up:
            found = FIND(rows, work, first_row, end, SHAPE)
        else:
            found = (block * SHAPE.block_m if SHAPE.is_padded else first_row, end - first_row)
        for step in range(SHAPE.steps):
            stage = wait_free(bars, number)
            _load_weights(stages, weight, rows, row, found, step, stage, SHAPE)
            if SHAPE.is_up:
                COPY(found, step, stages, stage)
                async_copy.commit_group()
                if number > 0:
                    async_copy.wait_group(1)
                    _signal(bars.index((number - 1) % STAGES))
            else:
                _load_rows(stages, rows, found, step, stage, SHAPE)
            number += 1
    if SHAPE.is_up:  # noqa: SIM102  the device's `and` would take both
        if number > 0:
            async_copy.wait_group(0)
            _signal(bars.index((number - 1) % STAGES))


@gluon.jit
def _signal(bar):
    """Signals that all threads' copies have arrived and are visible to tensor cores."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _load_weights(stages, weight, rows, row, found, step, stage, SHAPE: gl.constexpr):
    """Loads a step's weights of all parts by TMA, the first part's from `row` on. The barrier
    awaits boxes of rows too."""
    bar, weights = stages.bars.index(stage), stages.weights
    HEIGHT: gl.constexpr = weights.type.shape[1]
    WIDTH: gl.constexpr = weights.type.shape[2]
    PARTS: gl.constexpr = SHAPE.parts
    LEAST: gl.constexpr = PARTS * HEIGHT * WIDTH * weights.dtype.primitive_bitwidth // 8
    if SHAPE.is_up:
        mbarrier.expect(bar, LEAST)
    else:
        BOX: gl.constexpr = rows.block_type.shape[0]
        ROWS: gl.constexpr = BOX * _BLOCK * rows.dtype.primitive_bitwidth // 8
        if SHAPE.block_m > BOX:
            mbarrier.expect(bar, LEAST + 2 * ROWS, pred=found[1] > BOX)
            mbarrier.expect(bar, LEAST + ROWS, pred=found[1] <= BOX)
        else:
            mbarrier.expect(bar, LEAST + ROWS)
    for part in gl.static_range(PARTS):
        at = [row + part * SHAPE.apart, step * WIDTH]
        load_box(weight, at, bar, weights.index(stage * PARTS + part))


@gluon.jit
def _load_rows(stages, rows, found, step, stage, SHAPE: gl.constexpr):
    """Loads a step of a block's rows, which are adjacent, by TMA. Blocks of few rows have no second
    box."""
    BOX: gl.constexpr = rows.block_type.shape[0]
    WIDTH: gl.constexpr = rows.block_type.shape[1]
    PIECES: gl.constexpr = _BLOCK // WIDTH
    first, num_rows = found
    bar = stages.bars.index(stage)
    for piece in gl.static_range(PIECES):
        place = stages.inputs.index(2 * stage + piece)
        column = step * _BLOCK + piece * WIDTH
        load_box(rows, [first, column], bar, place if PIECES == 1 else place.slice(0, BOX, 0))
        if SHAPE.block_m > BOX:
            rest = place.slice(BOX, BOX, 0) if PIECES == 2 else stages.inputs.index(2 * stage + 1)
            load_box(rows, [first + BOX, column], bar, rest, pred=num_rows > BOX)
