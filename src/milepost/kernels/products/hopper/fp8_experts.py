"""Experts of FP8 weights and few tokens on Hopper, both projections in one launch, in Gluon.

An expert that was chosen is multiplied with blocks of its own rows (`triton_gathering`), and what
no row fills is dropped. A program on each SM takes its share of all experts' up projections, then
of their down projections, whose weights are on their way meanwhile: loading does not stop in
between. What one program rounds another multiplies, once a counter says that it is there. All
programs are resident and have their up projections behind them by then, so none waits for ever; two
such launches at once on one GPU could.

Legend: T tokens, N experts of a token, P = T * N routed tokens, X experts, M rows of a block, H
hidden size, I an expert's size, D scales of a row.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tensors import FP8_MAX, LEAST_SCALE
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper.fp8_experts_parts import (
    fence_async,
    find_down,
    find_place,
    open_stages,
    produce,
    share_down,
)
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run_experts import RoutedRows

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)
_BLOCK_M = 8
_STAGES = 4
"""What is on its way at a time, 32 KiB a stage: with six, memory is 1 % slower."""
_REGISTERS, _PRODUCER_REGISTERS = 128, 56


def run(routed: RoutedRows) -> Tensor:
    """Partials [T, N, H]."""
    up, down, chip = routed.up, routed.down, routed.chip
    assert isinstance(up, Fp8), "the kernel's form"
    assert isinstance(down, Fp8), "experts have one form"
    size, num_inputs = routed.size, up.num_inputs
    rows, row_scales = round_lines(routed.rows, up, chip)
    given = gather(rows, row_scales, routed.experts, routed.num_experts, _BLOCK_M)
    active, active_scales = new_rounded(routed, len(given.rows))
    output = routed.new_output(routed.experts.shape[1])
    _mix_kernel[(chip.num_sms,)](
        TensorDescriptor.from_tensor(given.rows, [_BLOCK_M, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(given.scales, [1, _BLOCK_M], _SCALES),
        TensorDescriptor.from_tensor(up.values.view(-1, num_inputs), [BLOCK, BLOCK], _LAYOUT),
        up.scales,
        TensorDescriptor.from_tensor(active, [_BLOCK_M, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(active_scales, [1, _BLOCK_M], _SCALES),
        TensorDescriptor.from_tensor(down.values.view(-1, size), [BLOCK, BLOCK], _LAYOUT),
        down.scales,
        active,
        active_scales,
        routed.routing_weights,
        output,
        given.routed,
        given.experts,
        given.counters,
        given.count,
        len(active),
        INPUTS=num_inputs,
        SIZE=size,
        BLOCK_M=_BLOCK_M,
        BLOCK=BLOCK,
        STAGES=_STAGES,
        WIDE=2 if size % (2 * BLOCK) == 0 else 1,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit(do_not_specialize=["capacity"])
def _mix_kernel(
    rows,
    row_scales,
    up,
    up_scales,
    active_rows,
    active_row_scales,
    down,
    down_scales,
    active,
    active_scales,
    shares,
    output,
    routed,
    owners,
    counters,
    count,
    capacity,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    stages = open_stages(up, row_scales, BLOCK_M, BLOCK, STAGES, WIDE)
    wait_for_inputs()
    launch_dependents()
    lists = (owners, counters, count)
    made = (active, active_scales, capacity)
    consumed = (up_scales, down_scales, made, shares, output, routed)
    produced = (rows, row_scales, up, active_rows, active_row_scales, down)
    gl.warp_specialize(
        [
            (_consume, (stages, lists, consumed, INPUTS, SIZE, STAGES, WIDE)),
            (produce, (stages, lists, produced, INPUTS, SIZE, STAGES, WIDE)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    stages,
    lists,
    consumed,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Multiply what is loaded."""
    up_scales, down_scales, made, shares, output, routed = consumed
    dtype: gl.constexpr = output.dtype.element_ty
    number = _consume_up(stages, lists, routed, up_scales, made, dtype, INPUTS, SIZE, STAGES, WIDE)
    _consume_down(
        stages, lists, routed, down_scales, shares, output, number, INPUTS, SIZE, STAGES, WIDE
    )


@gluon.jit
def _consume_up(
    stages,
    lists,
    routed,
    scales,
    made,
    DTYPE: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """What gates and up projection come to, rounded. Returns the number of the next step."""
    owners, done, num_blocks = lists[0], lists[1], gl.load(lists[2])
    active, active_scales, capacity = made
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    TILES: gl.constexpr = SIZE // BLOCK
    STEPS: gl.constexpr = INPUTS // BLOCK
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    o_n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RESULT))
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, RESULT))
    number = 0
    for unit in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        place, tile = unit // TILES, unit % TILES
        expert = gl.load(owners + place)
        row = place * BLOCK_M + o_m
        is_row = gl.load(routed + row) >= 0
        p_gate = scales + (expert * (2 * TILES) + tile) * STEPS
        p_up = p_gate + TILES * STEPS
        if WIDE == 2:
            gate, up = _add_up_in_turn(stages, number, p_gate, p_up, STEPS, STAGES, RESULT)
        else:
            gate, up = _add_up_at_once(stages, number, p_gate, p_up, STEPS, STAGES, RESULT)
        number += STEPS
        values, scale = _round(gate, up, DTYPE)
        gl.store(active_scales + tile * capacity + row, scale)
        target = active + row.to(gl.int64)[None, :] * SIZE + (tile * BLOCK + o_n)[:, None]
        gl.store(target, values, mask=is_row[None, :])
        fence_async()
        thread_barrier()
        gl.atomic_add(done + place, 1, sem="release")
    return number


@gluon.jit
def _consume_down(
    stages,
    lists,
    routed,
    scales,
    shares,
    output,
    number,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """The experts' outputs, times the tokens' shares of them, to `output` [P, INPUTS]."""
    owners, num_blocks = lists[0], gl.load(lists[2])
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    COLUMNS: gl.constexpr = INPUTS // (2 * BLOCK)
    STEPS: gl.constexpr = SIZE // BLOCK
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    o_n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RESULT))
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, RESULT))
    turns, num_units = share_down(num_blocks, SIZE // BLOCK, COLUMNS, INPUTS // SIZE)
    expert = gl.load(owners + find_place(0, turns, num_blocks, COLUMNS))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, turns, num_blocks, COLUMNS))
        unit = find_down(index, turns)
        place, tile = unit // COLUMNS, unit % COLUMNS
        own = gl.load(routed + place * BLOCK_M + o_m)
        share = gl.load(shares + own, mask=own >= 0, other=0.0).to(gl.float32)
        p_first = scales + (expert * COLUMNS + tile) * (2 * STEPS)
        p_second = p_first + STEPS
        if WIDE == 2:
            first = _add_up(stages, number, p_first, STEPS, STAGES, RESULT)
            second = _add_up(stages, number + STEPS // 2, p_second, STEPS, STAGES, RESULT)
        else:
            first, second = _add_up_at_once(
                stages, number, p_first, p_second, STEPS, STAGES, RESULT
            )
        number += STEPS
        target = output + own.to(gl.int64)[None, :] * INPUTS
        target += (tile * (2 * BLOCK) + o_n)[:, None]
        is_row = (own >= 0)[None, :]
        gl.store(target, (first * share[None, :]).to(output.dtype.element_ty), mask=is_row)
        target += BLOCK
        gl.store(target, (second * share[None, :]).to(output.dtype.element_ty), mask=is_row)
        expert = next_expert


@gluon.jit
def _add_up_at_once(
    stages,
    number,
    p_first,
    p_second,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESULT: gl.constexpr,
):
    """Two sums [BLOCK, M] of products, each with its scales: a step has one block of either."""
    first, second = _nothing(stages, RESULT), _nothing(stages, RESULT)
    first_scale, second_scale = gl.load(p_first), gl.load(p_second)
    for step in range(STEPS):
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        product, other, scale, _ = _multiply(stages, number + step, STAGES, RESULT)
        first += product * (scale * first_scale)
        second += other * (scale * second_scale)
        first_scale, second_scale = next_first, next_second
    return first, second


@gluon.jit
def _add_up_in_turn(
    stages,
    number,
    p_first,
    p_second,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESULT: gl.constexpr,
):
    """The same where a step has two blocks of one of them, and the next of the other."""
    first, second = _nothing(stages, RESULT), _nothing(stages, RESULT)
    a, b = gl.load(p_first), gl.load(p_first + 1)
    c, d = gl.load(p_second), gl.load(p_second + 1)
    for step in range(0, STEPS, 2):
        ahead = gl.minimum(step + 2, STEPS - 2)
        next_a, next_b = gl.load(p_first + ahead), gl.load(p_first + ahead + 1)
        next_c, next_d = gl.load(p_second + ahead), gl.load(p_second + ahead + 1)
        product, other, scale, other_scale = _multiply(stages, number + step, STAGES, RESULT)
        first += product * (scale * a)
        first += other * (other_scale * b)
        product, other, scale, other_scale = _multiply(stages, number + step + 1, STAGES, RESULT)
        second += product * (scale * c)
        second += other * (other_scale * d)
        a, b, c, d = next_a, next_b, next_c, next_d
    return first, second


@gluon.jit
def _add_up(
    stages, number, p_scale, STEPS: gl.constexpr, STAGES: gl.constexpr, RESULT: gl.constexpr
):
    """One such sum, of which a step has two blocks."""
    total = _nothing(stages, RESULT)
    for step in gl.static_range(0, STEPS, 2):
        a, b = gl.load(p_scale + step), gl.load(p_scale + step + 1)
        product, other, scale, other_scale = _multiply(stages, number + step // 2, STAGES, RESULT)
        total += product * (scale * a)
        total += other * (other_scale * b)
    return total


@gluon.jit
def _nothing(stages, RESULT: gl.constexpr):
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    return gl.zeros([BLOCK, BLOCK_M], gl.float32, layout=RESULT)


@gluon.jit
def _multiply(stages, number, STAGES: gl.constexpr, RESULT: gl.constexpr):
    """A step's two products [BLOCK, M], and the scales of the rows of each."""
    inputs, weights, held, bars = stages
    WIDE: gl.constexpr = inputs.type.shape[0] // STAGES
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    stage = number % STAGES
    own, others = WIDE * stage, WIDE * stage + WIDE - 1
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    nothing = _nothing(stages, RESULT)
    right, other = inputs.index(own).permute((1, 0)), inputs.index(others).permute((1, 0))
    first = warpgroup_mma(weights.index(2 * stage), right, nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(
        weights.index(2 * stage + 1), other, nothing, use_acc=False, is_async=True
    )
    scale = held.index(own).slice(0, BLOCK_M, dim=1).load(RESULT)
    other_scale = held.index(others).slice(0, BLOCK_M, dim=1).load(RESULT)
    first, second = warpgroup_mma_wait(0, [first, second])
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second, scale, other_scale


@gluon.jit
def _round(gate, up, DTYPE: gl.constexpr):
    """SiLU(gate) * up [BLOCK, M], rounded, and the rows' scales."""
    values = gate * (1 / (1 + gl.exp(-gate))) * up
    # Between the projections activations have 16 bits, whatever computes them.
    values = values.to(DTYPE).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 0) / _LARGEST, _LEAST_SCALE)
    values = gl.minimum(gl.maximum(values / scale[None, :], -_LARGEST), _LARGEST)
    return values.to(gl.float8e4nv), scale
