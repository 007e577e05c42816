"""The frame of the experts' GEMMs for many rows on Hopper, in Gluon; FP8 and four bits fill it in.

Some warps bring steps to shared memory, two groups of four warps multiply them. The up projection's
rows lie where the tokens are, so four warps gather them; the down projection's are brought by TMA,
as all weights are, and one warp asks for that. A form says how rows are loaded and what a group of
warps makes of a tile.

The stages are `inputs` [2 * STAGES, ...], `weights` [PARTS * STAGES, ...] in shared memory, and
`bars`: those of stages that are loaded, then those of stages that are used up. A tile has one or
two parts: gates and ups, or two blocks of outputs.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import (
    launch_dependents,
    load_box,
    thread_barrier,
    wait_for_inputs,
)
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.portable.expert_parts import RowGroups

REGISTERS = 168
"""Registers of a thread, before the groups share them out."""
_GATHERING, _ASKING = (4, 224, 56), (1, 240, 24)
"""Warps that load, and registers of a thread that multiplies and of one that loads."""


class ExpertScales(NamedTuple):
    """Scales of a product; what a form does not have is None."""

    weights: Any
    zeros: Any = None
    rows: Any = None
    """[D, rows], `scale_stride` apart."""


class ExpertOutput(NamedTuple):
    """The tensor that takes a product."""

    base: Any
    scales: Any = None
    """[D, rows], `output_stride` apart, if it is rounded."""
    routing_weights: Any = None
    """[P], for the down projection."""


class GroupStrides(NamedTuple):
    """Elements between lines of scales, and of blocks. Launches take them one by one: within a
    tuple Triton would compile anew for multiples of 16."""

    scales: int = 0
    output: int = 0
    capacity: int = 0
    """Between lines of `Groups.blocks`."""


class GroupedStages(NamedTuple):
    """A form's buffers and barriers."""

    inputs: Any
    weights: Any
    bars: Any


class GroupedWork(NamedTuple):
    """Tiles of blocks of rows, shared out between programs."""

    groups: Any
    strides: Any
    num_tiles: Any


class GroupedForm(NamedTuple):
    """Functions of the device that differ between forms of weights, for one projection."""

    open: Any
    produce: Any
    consume: Any


class ProjectionShape(NamedTuple):
    """A projection and its tiles; a constant on the device."""

    top_k: int
    parts: int
    height: int
    """Rows of an expert's weights."""
    apart: int
    """Rows of weights from a tile's first part to its second."""
    wide: int
    """Rows of weights from a tile to the next."""
    outputs: int
    """Columns of the output."""
    tiles: int
    """Tiles of a block of rows."""
    steps: int
    group: int
    """Inputs that share a scale."""
    block_m: int
    stages: int
    is_gated: bool
    is_bfloat: bool
    """Whether the rows were bfloat16 before they were rounded."""

    @staticmethod
    def of(weight: Any, outputs: int, *, parts: int, **how: Any) -> ProjectionShape:
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
            is_gated=is_gated,
            **how,
        )


def launch(
    rows: Any,
    weight: Any,
    scales: ExpertScales,
    output: ExpertOutput,
    groups: Groups,
    strides: GroupStrides,
    shape: ProjectionShape,
    form: GroupedForm,
) -> None:
    """Launches a projection of `rows`, a tensor that is gathered or a descriptor of one that lies
    by block."""
    is_up = isinstance(rows, Tensor)
    warps, consumer, producer = _GATHERING if is_up else _ASKING
    device = output.base.device
    _project_kernel[(num_sms(device),)](
        rows,
        weight,
        scales,
        output,
        RowGroups(groups.order, groups.blocks, groups.num_blocks),
        rows.stride(0) if is_up else 0,
        strides.scales,
        strides.output,
        groups.blocks.shape[1],
        SHAPE=shape,
        OPEN=form.open,
        PRODUCE=form.produce,
        CONSUME=form.consume,
        LOADING_WARPS=warps,
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
        num_warps=4,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["scale_stride", "output_stride", "capacity"])
def _project_kernel(
    rows,
    weight,
    scales,
    output,
    groups,
    stride,
    scale_stride,
    output_stride,
    capacity,
    SHAPE: gl.constexpr,
    OPEN: gl.constexpr,
    PRODUCE: gl.constexpr,
    CONSUME: gl.constexpr,
    LOADING_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Each program takes every so many tiles."""
    stages = OPEN(output.base.dtype.element_ty, weight, SHAPE)
    wait_for_inputs()
    launch_dependents()
    strides = GroupStrides(scale_stride, output_stride, capacity)
    work = GroupedWork(groups, strides, gl.load(groups.num_blocks) * SHAPE.tiles)
    gl.warp_specialize(
        [
            (_consume, (CONSUME, stages, work, scales, output, 0, SHAPE)),
            (_consume, (CONSUME, stages, work, scales, output, 1, SHAPE)),
            (_produce, (PRODUCE, stages, work, rows, stride, weight, SHAPE)),
        ],
        [4, LOADING_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    CONSUME: gl.constexpr, stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr
):
    CONSUME(stages, work, scales, output, OWN, SHAPE)


@gluon.jit
def _produce(PRODUCE: gl.constexpr, stages, work, rows, stride, weight, SHAPE: gl.constexpr):
    PRODUCE(stages, work, rows, stride, weight, SHAPE)


@gluon.jit
def open_bars(STAGES: gl.constexpr, LOADERS: gl.constexpr):
    """Allocates barriers of stages, with LOADERS of a stage each."""
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=LOADERS)
        mbarrier.init(bars.index(STAGES + stage), count=2)
    return bars


@gluon.jit
def find_block(work, block):
    """Returns a block's expert, first row and end of the expert's rows."""
    blocks, capacity = work.groups.blocks, work.strides.capacity
    expert = gl.load(blocks + block)
    return expert, gl.load(blocks + capacity + block), gl.load(blocks + 2 * capacity + block)


@gluon.jit
def wait_for_room(number, bars, STAGES: gl.constexpr):
    """Returns the stage of a program's step of this number, once it is used up."""
    stage = number % STAGES
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def load_weights(weight, row, step, stages, stage, SHAPE: gl.constexpr):
    """Has TMA bring a step's weights of all parts, `row` being the first one's."""
    weights = stages.weights
    WIDTH: gl.constexpr = weights.type.shape[2]
    PARTS: gl.constexpr = SHAPE.parts
    for part in gl.static_range(PARTS):
        place = weights.index(stage * PARTS + part)
        load_box(weight, [row + part * SHAPE.apart, step * WIDTH], stages.bars.index(stage), place)


@gluon.jit
def produce_gathered(
    stages,
    work,
    rows,
    stride,
    weight,
    SHAPE: gl.constexpr,
    FIND: gl.constexpr,
    LOAD: gl.constexpr,
    WEIGHT_BYTES: gl.constexpr,
):
    """Loads every step of every tile as soon as there is room, with rows where they lie. Copies of
    rows are waited for a step later: TMA's signal for weights can't wait for them. FIND returns
    pointers to a block's rows, LOAD copies a step of them."""
    bars = stages.bars
    STAGES: gl.constexpr = SHAPE.stages
    number = 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        expert, first_row, end = find_block(work, index // SHAPE.tiles)
        row = expert * SHAPE.height + index % SHAPE.tiles * SHAPE.wide
        found = FIND(rows, stride, work.groups.order, first_row, end, SHAPE)
        for step in range(SHAPE.steps):
            stage = wait_for_room(number, bars, STAGES)
            mbarrier.expect(bars.index(stage), WEIGHT_BYTES)
            load_weights(weight, row, step, stages, stage, SHAPE)
            LOAD(found, step, stages, stage)
            async_copy.commit_group()
            if number > 0:
                async_copy.wait_group(1)
                _signal(bars.index((number - 1) % STAGES))
            number += 1
    if number > 0:
        async_copy.wait_group(0)
        _signal(bars.index((number - 1) % STAGES))


@gluon.jit
def _signal(bar):
    """All threads' copies have arrived, also for those who read them as TMA does."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bar, count=1)
