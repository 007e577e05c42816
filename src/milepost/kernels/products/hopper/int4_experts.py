"""Experts of four-bit weights and few tokens on Hopper, both projections in one launch, in Gluon.

As `triton_hopper_experts`, whose order of work it shares: an expert that was chosen is multiplied
with blocks of its own rows, and three programs on each SM take their share of all experts' up
projections, then of their down projections, whose weights are on their way meanwhile. Weights come
to shared memory as they are (`nibble_experts_gluon`), and are unpacked where they are multiplied
(`nibble_products_gluon`).

All programs are resident: registers and shared memory are for exactly three an SM.

Legend: T tokens, N experts of a token, X experts, N outputs and M rows of a block, H hidden size, I
an expert's size.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper.fp8_experts_parts import find_down, find_place, share_down
from milepost.kernels.products.hopper.int4_experts_parts import (
    HALF,
    ROWS_LAYOUT,
    WEIGHTS_LAYOUT,
    num_steps,
    open_stages,
    produce,
)
from milepost.kernels.products.hopper.int4_experts_products import (
    BLOCK_M,
    PRODUCTS,
    load_scales,
    multiply,
    outputs_of,
    scales_of,
)
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.run_experts import RoutedRows

_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(HALF)
_STAGES = 3
PROGRAMS = 3
"""Of an SM, all of them resident: with two, of five stages each, 64 tokens take 5 % longer."""
REGISTERS, _PRODUCER_REGISTERS = 80, 24


def run(routed: RoutedRows) -> Tensor:
    """Partials [T, N, H]."""
    up, down, chip = routed.up, routed.down, routed.chip
    assert isinstance(up, Int4), "the kernel's form"
    assert isinstance(down, Int4), "experts have one form"
    size, num_inputs = routed.size, up.num_inputs
    given = gather(routed.values, None, routed.experts, routed.num_experts, BLOCK_M)
    active = routed.values.new_empty(len(given.rows), size)
    output = routed.new_output(routed.experts.shape[1])
    _mix_kernel[(PROGRAMS * chip.num_sms,)](
        _boxes(given.rows, BLOCK_M, HALF, ROWS_LAYOUT),
        _boxes(up.packed.view(-1, num_inputs // 2), HALF, BLOCK, WEIGHTS_LAYOUT),
        up.scales,
        up.zeros,
        _boxes(active, BLOCK_M, HALF, ROWS_LAYOUT),
        _boxes(down.packed.view(-1, size // 2), HALF, BLOCK, WEIGHTS_LAYOUT),
        down.scales,
        down.zeros,
        active,
        routed.routing_weights,
        output,
        given.routed,
        given.experts,
        given.counters,
        given.count,
        INPUTS=num_inputs,
        SIZE=size,
        GATED=routed.is_gated,
        UP_GROUP=up.group,
        DOWN_GROUP=down.group,
        STAGES=_STAGES,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )
    return output


def _boxes(
    matrix: Tensor, height: int, width: int, layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [height, width], layout)


@quick
@gluon.jit
def _mix_kernel(
    rows,
    up,
    up_scales,
    up_zeros,
    active_rows,
    down,
    down_scales,
    down_zeros,
    active,
    shares,
    output,
    routed,
    owners,
    counters,
    count,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    UP_GROUP: gl.constexpr,
    DOWN_GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    stages = open_stages(rows, up, STAGES)
    wait_for_inputs()
    launch_dependents()
    lists = (owners, counters, count)
    consumed = (up_scales, up_zeros, down_scales, down_zeros, active, shares, output, routed)
    produced = (rows, up, active_rows, down)
    gl.warp_specialize(
        [
            (_consume, (stages, lists, consumed, INPUTS, SIZE, GATED, UP_GROUP, DOWN_GROUP,
                        STAGES)),
            (produce, (stages, lists, produced, INPUTS, SIZE, GATED, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _consume(
    stages,
    lists,
    consumed,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    UP_GROUP: gl.constexpr,
    DOWN_GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply what is loaded."""
    up_scales, up_zeros, down_scales, down_zeros, active, shares, output, routed = consumed
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    SCALES: gl.constexpr = SIZE // DOWN_GROUP
    scaled = scales_of(down_scales, down_zeros, SCALES)
    begun = _begin_down(lists, routed, scaled, INPUTS, SIZE, GATED, DOWN_GROUP, BLOCK_M)
    number = _consume_up(
        stages, lists, up_scales, up_zeros, active, INPUTS, SIZE, GATED, UP_GROUP, STAGES
    )
    _consume_down(
        stages, lists, routed, scaled, shares, output, begun, number,
        INPUTS, SIZE, DOWN_GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def _consume_up(
    stages,
    lists,
    scales,
    zeros,
    active,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What gates and up projection come to. Returns the number of the next step."""
    owners, done, num_blocks = lists[0], lists[1], gl.load(lists[2])
    WIDE: gl.constexpr = _HALF if GATED else _BLOCK
    APART: gl.constexpr = SIZE if GATED else _HALF
    HEIGHT: gl.constexpr = 2 * SIZE if GATED else SIZE
    TILES: gl.constexpr = SIZE // WIDE
    SCALES: gl.constexpr = INPUTS // GROUP
    num_units, stride = num_blocks * TILES, gl.num_programs(0)
    own = scales_of(scales, zeros, SCALES)
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
            APART, SCALES, GROUP, num_steps(INPUTS), STAGES,
        )  # fmt: skip
        number += num_steps(INPUTS)
        if GATED:
            _store_active(active, activate(up, gate, True), unit, 0, SIZE, WIDE)
        else:
            _store_active(active, activate(gate, gate, False), unit, 0, SIZE, WIDE)
            _store_active(active, activate(up, up, False), unit, _HALF, SIZE, WIDE)
        thread_barrier()
        gl.atomic_add(done + unit // TILES, 1, sem="release")
        place = next_place
    return number


@gluon.jit
def _store_active(
    active, values, unit, BEYOND: gl.constexpr, SIZE: gl.constexpr, WIDE: gl.constexpr
):
    """A part's activations, which begin so many BEYOND the unit's; of what is no row as well."""
    TILES: gl.constexpr = SIZE // WIDE
    BLOCK_M: gl.constexpr = values.shape[1]
    o_n = outputs_of(gl.SliceLayout(1, PRODUCTS))
    row = unit // TILES * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, PRODUCTS))
    target = active + row.to(gl.int64)[None, :] * SIZE
    target += (unit % TILES * WIDE + BEYOND + o_n)[:, None]
    gl.store(target, values.to(active.dtype.element_ty))


@gluon.jit
def _begin_down(
    lists,
    routed,
    scaled,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """A program's share of the down projection, and what its first unit begins with: asked for
    ahead of the up projection, so that nothing is waited for in between."""
    owners, num_blocks = lists[0], gl.load(lists[2])
    TILES: gl.constexpr = SIZE // (_HALF if GATED else _BLOCK)
    COLUMNS: gl.constexpr = INPUTS // _BLOCK
    SCALES: gl.constexpr = SIZE // GROUP
    share, num_units = share_down(num_blocks, TILES, COLUMNS, INPUTS // SIZE)
    expert = gl.load(owners + find_place(0, share, num_blocks, COLUMNS))
    next_expert = gl.load(owners + find_place(1, share, num_blocks, COLUMNS))
    own = _load_routed(routed, find_place(0, share, num_blocks, COLUMNS), BLOCK_M)
    place = (expert * INPUTS + find_down(0, share) % COLUMNS * _BLOCK) * SCALES
    held = load_scales(scaled, place, 0, _HALF, SCALES, GROUP)
    return share, num_units, next_expert, own, place, held


@gluon.jit
def _load_routed(routed, block, BLOCK_M: gl.constexpr):
    """Which routed tokens a block's rows are [M]."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, PRODUCTS))
    return gl.load(routed + block * BLOCK_M + o_m)


@gluon.jit
def _consume_down(
    stages,
    lists,
    routed,
    scaled,
    shares,
    output,
    begun,
    number,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The experts' outputs, times the tokens' shares of them, to `output` [P, INPUTS]."""
    owners, num_blocks = lists[0], gl.load(lists[2])
    turns, num_units, next_expert, next_own, place, held = begun
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    COLUMNS: gl.constexpr = INPUTS // _BLOCK
    SCALES: gl.constexpr = SIZE // GROUP
    dtype: gl.constexpr = output.dtype.element_ty
    o_n = outputs_of(gl.SliceLayout(1, PRODUCTS))
    for index in range(num_units):
        own = next_own
        is_row = own >= 0
        share = gl.load(shares + own, mask=is_row, other=0.0).to(gl.float32)[None, :]
        column = find_down(index + 1, turns) % COLUMNS * _BLOCK
        next_place = (next_expert * INPUTS + column) * SCALES
        next_expert = gl.load(owners + find_place(index + 2, turns, num_blocks, COLUMNS))
        next_own = _load_routed(routed, find_place(index + 1, turns, num_blocks, COLUMNS), BLOCK_M)
        first, second, held = multiply(
            stages, held, scaled, place, next_place, number,
            _HALF, SCALES, GROUP, num_steps(SIZE), STAGES,
        )  # fmt: skip
        number += num_steps(SIZE)
        target = output + own.to(gl.int64)[None, :] * INPUTS
        target += (find_down(index, turns) % COLUMNS * _BLOCK + o_n)[:, None]
        gl.store(target, (first * share).to(dtype), mask=is_row[None, :])
        gl.store(target + _HALF, (second * share).to(dtype), mask=is_row[None, :])
        place = next_place
