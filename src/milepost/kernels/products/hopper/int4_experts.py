"""Experts of four-bit weights and few tokens on Hopper, in Gluon: `experts_parts` with int4 filled
in.

A unit is 128 rows of an expert's weights in two parts of 64: of the up projection gates and the ups
that belong to them, or without gates 128 ups; of the down projection 128 outputs. A step is 256
inputs of a unit: TMA brings pieces of 128 bytes, for no wider ones fit what banks of shared memory
are swizzled by. Weights come to shared memory as they are, and are unpacked where they are
multiplied (`int4_experts_parts`).

The stages are `inputs` [4 * STAGES, BLOCK_M, 64], a step's rows in halves of blocks, and `weights`
[2 * STAGES, 64, 128], bytes of both parts, in shared memory, and barriers: those of stages that are
`loaded`, which await weights and rows apart, and of those that are `used` up.

Legend: T tokens, N experts of a token, X experts, M rows of a block, H hidden size, I an expert's
size.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box, thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper.experts_parts import (
    MixtureBoxes,
    MixtureForm,
    MixtureShape,
    Residence,
    find_down,
    find_place,
    launch,
    share_down,
    wait_for,
)
from milepost.kernels.products.hopper.grouped_parts import ExpertOutput, ExpertScales
from milepost.kernels.products.hopper.int4_experts_parts import (
    BLOCK_M,
    HALF,
    PRODUCTS,
    STEP,
    HalvedStages,
    load_scales,
    multiply,
    outputs_of,
    scales_of,
)
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.run_experts import RoutedRows

RESIDENCE = Residence(programs=3, registers=80, producer_registers=24)
"""With two programs, of five stages each, 64 tokens take 5 % longer."""
_STAGES = 3
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WEIGHTS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_BLOCK, _HALF, _STEP = gl.constexpr(BLOCK), gl.constexpr(HALF), gl.constexpr(STEP)
_M = gl.constexpr(BLOCK_M)


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down, size = routed.up, routed.down, routed.size
    assert isinstance(up, Int4), "the kernel's form"
    assert isinstance(down, Int4), "experts have one form"
    given = gather(routed.values, None, routed.experts, routed.num_experts, BLOCK_M)
    active = routed.values.new_empty(len(given.rows), size)
    boxes = MixtureBoxes(
        rows=_row_boxes(given.rows),
        row_scales=None,
        up=_weight_boxes(up),
        active=_row_boxes(active),
        active_scales=None,
        down=_weight_boxes(down),
    )
    wide = HALF if routed.is_gated else BLOCK
    shape = MixtureShape(
        inputs=up.num_inputs,
        size=size,
        is_gated=routed.is_gated,
        tiles=size // wide,
        columns=up.num_inputs // BLOCK,
        wide=wide,
        block_m=BLOCK_M,
        stages=_STAGES,
        up_group=up.group,
        down_group=down.group,
    )
    scales = ExpertScales(up.scales, up.zeros), ExpertScales(down.scales, down.zeros)
    return launch(routed, given, boxes, scales, ExpertOutput(active), shape, _FORM, RESIDENCE)


def _row_boxes(rows: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [BLOCK_M, HALF], _ROWS_LAYOUT)


def _weight_boxes(weight: Int4) -> TensorDescriptor:
    packed = weight.packed.view(-1, weight.num_inputs // 2)
    return TensorDescriptor.from_tensor(packed, [HALF, BLOCK], _WEIGHTS_LAYOUT)


@gluon.constexpr_function
def _num_steps(num_inputs: int) -> int:
    """Returns the number of steps. The last one may be half beyond the inputs, where all that is
    loaded is zeros."""
    return (num_inputs + STEP - 1) // STEP


@gluon.jit
def _open_stages(rows, row_scales, weight, SHAPE: gl.constexpr):
    """Allocates shared memory for the stages, and their barriers."""
    STAGES: gl.constexpr = SHAPE.stages
    inputs = gl.allocate_shared_memory(rows.dtype, [4 * STAGES, _M, _HALF], rows.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, _HALF, _BLOCK], weight.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=2)
        mbarrier.init(used.index(stage), count=1)
    return HalvedStages(inputs, weights, loaded, used)


@gluon.jit
def _load_up(stages, rows, up, row, first, number, SHAPE: gl.constexpr):
    """Has a unit's steps loaded; returns the number of the next step."""
    APART: gl.constexpr = SHAPE.size if SHAPE.is_gated else _HALF
    for step in range(_num_steps(SHAPE.inputs)):
        stage = _load_weights(up, row, APART, step, stages, number, SHAPE)
        _load_rows(rows, first, step, stages, stage)
        number += 1
    return number


@gluon.jit
def _load_down(stages, active, down, row, first, number, counter, SHAPE: gl.constexpr):
    """As `_load_up`, once the rows are there."""
    for step in range(_num_steps(SHAPE.size)):
        stage = _load_weights(down, row, _HALF, step, stages, number, SHAPE)
        if step == 0:
            wait_for(counter, SHAPE.tiles)
        _load_rows(active, first, step, stages, stage)
        number += 1
    return number


@gluon.jit
def _load_weights(matrix, row, APART: gl.constexpr, step, stages, number, SHAPE: gl.constexpr):
    """Has a step's weights loaded, once its stage, which is returned, is used up: those from `row`
    on and those APART from them."""
    stage = number % SHAPE.stages
    bar = stages.loaded.index(stage)
    mbarrier.wait(stages.used.index(stage), (number // SHAPE.stages & 1) ^ 1)
    mbarrier.expect(bar, 2 * _HALF * _BLOCK)
    for part in gl.static_range(2):
        at = [row + part * APART, step * _BLOCK]
        load_box(matrix, at, bar, stages.weights.index(2 * stage + part))
    return stage


@gluon.jit
def _load_rows(rows, first, step, stages, stage):
    """Has a step's rows from `first` on loaded."""
    bar = stages.loaded.index(stage)
    mbarrier.expect(bar, 2 * _M * _STEP)
    for i in gl.static_range(4):
        at = [first, step * _STEP + i * _HALF]
        load_box(rows[0], at, bar, stages.inputs.index(4 * stage + i))


@gluon.jit
def _consume(stages, lists, up_scales, down_scales, active, capacity, output, SHAPE: gl.constexpr):
    """Multiplies what is loaded."""
    scaled = scales_of(down_scales, SHAPE.size // SHAPE.down_group)
    begun = _begin_down(lists, scaled, SHAPE)
    number = _consume_up(stages, lists, up_scales, active.base, SHAPE)
    _consume_down(stages, lists, scaled, output, begun, number, SHAPE)


@gluon.jit
def _consume_up(stages, lists, scales, active, SHAPE: gl.constexpr):
    """Makes activations; returns the number of the next step."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    GATED: gl.constexpr = SHAPE.is_gated
    APART: gl.constexpr = SHAPE.size if GATED else _HALF
    HEIGHT: gl.constexpr = 2 * SHAPE.size if GATED else SHAPE.size
    WIDE: gl.constexpr = SHAPE.wide
    TILES: gl.constexpr = SHAPE.tiles
    GROUP: gl.constexpr = SHAPE.up_group
    SCALES: gl.constexpr = SHAPE.inputs // GROUP
    num_units, stride = num_blocks * TILES, gl.num_programs(0)
    own = scales_of(scales, SCALES)
    first = gl.minimum(gl.program_id(0), num_units - 1)
    expert = gl.load(owners + first // TILES)
    next_expert = gl.load(owners + gl.minimum(first + stride, num_units - 1) // TILES)
    place = (expert * HEIGHT + first % TILES * WIDE) * SCALES
    held = load_scales(own, place, 0, APART, SCALES, GROUP)
    number = 0
    for unit in range(gl.program_id(0), num_units, stride):
        following = gl.minimum(unit + stride, num_units - 1)
        next_place = (next_expert * HEIGHT + following % TILES * WIDE) * SCALES
        # Looked up two units ahead, or each would begin with waiting.
        next_expert = gl.load(owners + gl.minimum(following + stride, num_units - 1) // TILES)
        gate, up, held = multiply(
            stages, held, own, place, next_place, number,
            APART, SCALES, GROUP, _num_steps(SHAPE.inputs), SHAPE,
        )  # fmt: skip
        number += _num_steps(SHAPE.inputs)
        if GATED:
            _store_active(active, activate(up, gate, True), unit, 0, SHAPE)
        else:
            _store_active(active, activate(gate, gate, False), unit, 0, SHAPE)
            _store_active(active, activate(up, up, False), unit, _HALF, SHAPE)
        thread_barrier()
        gl.atomic_add(lists.counters + unit // TILES, 1, sem="release")
        place = next_place
    return number


@gluon.jit
def _store_active(active, values, unit, BEYOND: gl.constexpr, SHAPE: gl.constexpr):
    """Stores a part's activations, which begin BEYOND the unit's first; also those of what is no
    row."""
    TILES: gl.constexpr = SHAPE.tiles
    o_n = outputs_of(gl.SliceLayout(1, PRODUCTS))
    row = unit // TILES * _M + gl.arange(0, _M, gl.SliceLayout(0, PRODUCTS))
    target = active + row.to(gl.int64)[None, :] * SHAPE.size
    target += (unit % TILES * SHAPE.wide + BEYOND + o_n)[:, None]
    gl.store(target, values.to(active.dtype.element_ty))


@gluon.jit
def _begin_down(lists, scaled, SHAPE: gl.constexpr):
    """Returns a program's units of the down projection and what the first one needs, loaded before
    the up projection so that nothing is waited for in between."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    GROUP: gl.constexpr = SHAPE.down_group
    SCALES: gl.constexpr = SHAPE.size // GROUP
    share, num_units = share_down(num_blocks, SHAPE)
    expert = gl.load(owners + find_place(0, share, num_blocks, SHAPE))
    next_expert = gl.load(owners + find_place(1, share, num_blocks, SHAPE))
    own = _load_routed(lists.routed, find_place(0, share, num_blocks, SHAPE))
    place = (expert * SHAPE.inputs + find_down(0, share) % SHAPE.columns * _BLOCK) * SCALES
    held = load_scales(scaled, place, 0, _HALF, SCALES, GROUP)
    return share, num_units, next_expert, own, place, held


@gluon.jit
def _load_routed(routed, block):
    """Returns the routed tokens of a block's rows [M]."""
    o_m = gl.arange(0, _M, gl.SliceLayout(0, PRODUCTS))
    return gl.load(routed + block * _M + o_m)


@gluon.jit
def _consume_down(stages, lists, scaled, output, begun, number, SHAPE: gl.constexpr):
    """Stores the experts' outputs, times their routing weights, to `output` [P, INPUTS]."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    turns, num_units, next_expert, next_own, place, held = begun
    COLUMNS: gl.constexpr = SHAPE.columns
    GROUP: gl.constexpr = SHAPE.down_group
    SCALES: gl.constexpr = SHAPE.size // GROUP
    dtype: gl.constexpr = output.base.dtype.element_ty
    o_n = outputs_of(gl.SliceLayout(1, PRODUCTS))
    for index in range(num_units):
        own = next_own
        is_row = own >= 0
        weight = gl.load(output.routing_weights + own, mask=is_row, other=0.0).to(gl.float32)
        column = find_down(index + 1, turns) % COLUMNS * _BLOCK
        next_place = (next_expert * SHAPE.inputs + column) * SCALES
        next_expert = gl.load(owners + find_place(index + 2, turns, num_blocks, SHAPE))
        next_own = _load_routed(lists.routed, find_place(index + 1, turns, num_blocks, SHAPE))
        first, second, held = multiply(
            stages, held, scaled, place, next_place, number,
            _HALF, SCALES, GROUP, _num_steps(SHAPE.size), SHAPE,
        )  # fmt: skip
        number += _num_steps(SHAPE.size)
        target = output.base + own.to(gl.int64)[None, :] * SHAPE.inputs
        target += (find_down(index, turns) % COLUMNS * _BLOCK + o_n)[:, None]
        gl.store(target, (first * weight[None, :]).to(dtype), mask=is_row[None, :])
        gl.store(target + _HALF, (second * weight[None, :]).to(dtype), mask=is_row[None, :])
        place = next_place


_FORM = MixtureForm(_open_stages, _load_up, _load_down, _consume)
