"""Experts for few tokens on Hopper, in Gluon: both projections in one launch. This is the frame;
`fp8_experts` and `int4_experts` fill it in.

Each chosen expert is multiplied with blocks of its own rows (`gathering`). Every program takes a
share of all experts' up projections, then a share of their down projections, whose weights are
loaded meanwhile so that loading never stops. Before a program multiplies what others have made, it
waits for a counter. All programs are resident and finish their up projections first, so none waits
for ever; two such launches at once on one GPU could.

A unit is the work that a program takes at a time: some outputs of an expert for one block of rows.
A form says how a unit's steps are loaded and multiplied.

Legend: T tokens, N experts of a token, P = T * N routed tokens, M rows of a block, H hidden size, I
an expert's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.portable.gathering import Gathered, GatheredLists
from milepost.kernels.products.run import RoutedRows

BLOCK_M = 8
_M = gl.constexpr(BLOCK_M)


class ExpertScales(NamedTuple):
    """Scales of a product; None for those that a form does not have."""

    weights: Any
    zeros: Any = None
    rows: Any = None

    @staticmethod
    def of(weight: Any, rows: Tensor | None = None) -> ExpertScales:
        return ExpertScales(weight.scales, getattr(weight, "zeros", None), rows)


class ExpertOutput(NamedTuple):
    """Destination of a product, with its scales if it is rounded, and the routing weights [P] in
    the down projection."""

    base: Any
    scales: Any = None
    routing_weights: Any = None


class MixtureBoxes(NamedTuple):
    """TMA descriptors of a projection's rows, their scales (or None) and weights."""

    rows: Any
    row_scales: Any
    weight: Any


class MixtureShape(NamedTuple):
    """Both projections and their units; a constant on the device. A block of rows has `tiles` units
    of the up projection, `wide` rows of weights apart, and `columns` units of the down projection.
    `up_group` and `down_group` inputs share a scale in four bits."""

    inputs: int
    size: int
    is_gated: bool
    tiles: int
    columns: int
    wide: int
    stages: int
    up_group: int = 0
    down_group: int = 0
    limit: float = 0.0
    """See `RoutedRows.limit`."""

    @staticmethod
    def of(routed: RoutedRows, wide: int, width: int, stages: int, *groups: int) -> MixtureShape:
        """Returns the shape of `routed`; a unit of the down projection has `width` outputs."""
        inputs, size = routed.up.num_inputs, routed.size
        cut = size // wide, inputs // width, wide, stages
        shape = MixtureShape(inputs, size, routed.is_gated, *cut, *groups)
        return shape._replace(limit=routed.limit)


class MixtureForm(NamedTuple):
    """Differences between forms of weights: device functions, programs per SM, and registers of
    multiplying and of loading threads. All programs must be resident."""

    open: Any
    load_up: Any
    load_down: Any
    consume: Any
    programs: int
    registers: int
    loading_registers: int


def launch(
    routed: RoutedRows,
    given: Gathered,
    active: ExpertOutput,
    boxes: tuple[MixtureBoxes, MixtureBoxes],
    shape: MixtureShape,
    form: MixtureForm,
) -> Tensor:
    """Returns partials [T, N, H]. `active` [B * M, I] takes the outputs of the up projection."""
    output = routed.new_output(routed.experts.shape[1])
    mix_kernel[(form.programs * routed.chip.num_sms,)](
        *boxes[0],
        *boxes[1],
        ExpertScales.of(routed.up),
        ExpertScales.of(routed.down),
        active,
        ExpertOutput(output, routing_weights=routed.routing_weights),
        GatheredLists(given.routed, given.experts, given.counters, given.count),
        len(given.rows),
        SHAPE=shape,
        OPEN=form.open,
        LOAD_UP=form.load_up,
        LOAD_DOWN=form.load_down,
        CONSUME=form.consume,
        LOADING_REGISTERS=form.loading_registers,
        num_warps=4,
        maxnreg=form.registers,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit(do_not_specialize=["capacity"])
def mix_kernel(
    rows,
    row_scales,
    up,
    active_rows,
    active_scales,
    down,
    up_scales,
    down_scales,
    active,
    output,
    lists,
    capacity,
    SHAPE: gl.constexpr,
    OPEN: gl.constexpr,
    LOAD_UP: gl.constexpr,
    LOAD_DOWN: gl.constexpr,
    CONSUME: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    """Runs both projections: one warp loads, four multiply."""
    stages = OPEN(rows, row_scales, up, SHAPE)
    wait_for_inputs()
    launch_dependents()
    scales = up_scales, down_scales
    first, second = (rows, row_scales, up), (active_rows, active_scales, down)
    gl.warp_specialize(
        [
            (_consume, (CONSUME, stages, lists, scales, active, capacity, output, SHAPE)),
            (_produce, (LOAD_UP, LOAD_DOWN, stages, lists, first, second, SHAPE)),
        ],
        [1],
        [LOADING_REGISTERS],
    )


@gluon.jit
def _consume(
    CONSUME: gl.constexpr, stages, lists, scales, active, capacity, output, SHAPE: gl.constexpr
):
    CONSUME(stages, lists, scales, active, capacity, output, SHAPE)


@gluon.jit
def _produce(
    LOAD_UP: gl.constexpr, LOAD_DOWN: gl.constexpr, stages, lists, up, down, SHAPE: gl.constexpr
):
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
        number = LOAD_UP(stages, up, row, unit // TILES * _M, number, SHAPE)
        expert = next_expert
    share, num_units = share_down(num_blocks, SHAPE)
    expert = gl.load(owners + find_place(0, share, num_blocks, SHAPE))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, share, num_blocks, SHAPE))
        unit = find_down(index, share)
        row = expert * SHAPE.inputs + unit % COLUMNS * (SHAPE.inputs // COLUMNS)
        place = unit // COLUMNS
        counter, first = lists.counters + place, place * _M
        number = LOAD_DOWN(stages, down, row, first, number, counter, SHAPE)
        expert = next_expert


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
    """Returns a program's units of the down projection, for `find_down`, and their number. A block
    of rows has `tiles` units of the up projection, each worth RATIO of its `columns` of the down
    projection.

    Units of the up projection go round, and some programs have one less than others: first these
    get as much of the down projection instead. The rest goes round again."""
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


@gluon.jit
def store_routed(partials, own, weight, first, second, o_n, SHAPE: gl.constexpr):
    """Stores both parts of a unit [N, M], the first one's outputs at `o_n`, times the routing
    weights of the routed tokens `own` [M]. A negative entry of `own` has no row."""
    is_row = (own >= 0)[None, :]
    target = partials + own.to(gl.int64)[None, :] * SHAPE.inputs
    target += o_n[:, None]
    gl.store(target, (first * weight[None, :]).to(partials.dtype.element_ty), mask=is_row)
    target += first.shape[0]
    gl.store(target, (second * weight[None, :]).to(partials.dtype.element_ty), mask=is_row)
