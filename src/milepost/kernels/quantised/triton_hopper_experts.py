"""Experts of FP8 weights and few tokens on Hopper, both projections in one launch, in Gluon.

An expert that was chosen is multiplied with all tokens, and what was not asked for is dropped. A
program on each SM takes its share of all experts' up projections, then of their down projections,
whose weights are on their way meanwhile: loading does not stop in between. What one program rounds
another multiplies, once a counter says that it is there. All programs are resident and have their
up projections behind them by then, so none waits for ever; two such launches at once on one GPU
could.

Legend: T tokens, M tokens that are multiplied at a time, N experts of a token, P = T * N routed
tokens, X experts, H hidden size, I an expert's size, D scales of a row.
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

from milepost.kernels.device import Chip
from milepost.kernels.float8 import FP8, FP8_MAX
from milepost.kernels.gluon import thread_barrier
from milepost.kernels.launches import quick
from milepost.kernels.moe.listing import list_chosen
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.quantised.experts_gluon import (
    fence_async,
    find_down,
    find_place,
    open_stages,
    produce,
    share_down,
)
from milepost.kernels.quantised.forms import BLOCK, LEAST_SCALE, Fp8, Quantised
from milepost.kernels.tiles import next_power_of_2

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)
_MOST_CHOSEN = gl.constexpr(16)
_LEAST_M = 16
_STAGE_BYTES = 224 << 10
_REGISTERS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 168, 224, 56


def suits(experts: Tensor, up: Quantised, down: Quantised) -> bool:
    """Whether the kernel multiplies these: FP8 in blocks, with gates, and whole steps."""
    for each in (up, down):
        if not isinstance(each, Fp8) or each.input_scale is not None:
            return False
        if each.rows != BLOCK or each.depth != BLOCK:
            return False
    is_gated = up.num_outputs == 2 * down.num_inputs
    is_whole = down.num_outputs % (2 * BLOCK) == 0 and up.num_inputs == down.num_outputs
    return is_gated and is_whole and experts.shape[1] <= _MOST_CHOSEN.value


def mix(
    rows: Tensor,
    row_scales: Tensor,
    shares: Tensor,
    experts: Tensor,
    up: Fp8,
    down: Fp8,
    output: Tensor,
    chip: Chip,
) -> None:
    """`output` [T, N, H]: see `reference.mix`. `rows` [T, H] are rounded with `row_scales` [D, T],
    both in whole lines (`rounded.LINE`); `experts` [T, N] has no token's expert twice."""
    num_tokens, num_chosen = experts.shape
    num_experts, size, num_inputs = len(up.scales), down.num_inputs, up.num_inputs
    block_m = max(_LEAST_M, next_power_of_2(num_tokens))
    chosen = list_chosen(experts, num_experts)
    capacity = min(num_experts, experts.numel()) * block_m
    active = rows.new_empty(capacity, size, dtype=FP8)
    active_scales = row_scales.new_empty(size // BLOCK, capacity)
    stage_bytes = (2 * BLOCK + block_m) * BLOCK + 4 * max(block_m, 32)
    _mix_kernel[(chip.num_sms,)](
        TensorDescriptor.from_tensor(rows, [block_m, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(row_scales, [1, block_m], _SCALES),
        TensorDescriptor.from_tensor(up.values.view(-1, num_inputs), [BLOCK, BLOCK], _LAYOUT),
        up.scales,
        TensorDescriptor.from_tensor(active, [block_m, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(active_scales, [1, block_m], _SCALES),
        TensorDescriptor.from_tensor(down.values.view(-1, size), [BLOCK, BLOCK], _LAYOUT),
        down.scales,
        active,
        active_scales,
        shares,
        output,
        experts,
        chosen.experts,
        chosen.counters,
        chosen.count,
        num_tokens,
        capacity,
        TOP_K=num_chosen,
        INPUTS=num_inputs,
        SIZE=size,
        BLOCK_M=block_m,
        BLOCK=BLOCK,
        STAGES=min(8, _STAGE_BYTES // stage_bytes),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["num_tokens", "capacity"])
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
    experts,
    chosen,
    counters,
    count,
    num_tokens,
    capacity,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    stages = open_stages(up, row_scales, BLOCK_M, BLOCK, STAGES)
    wait_for_inputs()
    let_next_start()
    lists = (chosen, counters, count)
    made = (active, active_scales, capacity)
    consumed = (up_scales, down_scales, made, shares, output, experts, num_tokens)
    produced = (rows, row_scales, up, active_rows, active_row_scales, down)
    gl.warp_specialize(
        [
            (_consume, (stages, lists, consumed, 0, TOP_K, INPUTS, SIZE, STAGES)),
            (_consume, (stages, lists, consumed, 1, TOP_K, INPUTS, SIZE, STAGES)),
            (produce, (stages, lists, produced, INPUTS, SIZE, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    stages,
    lists,
    consumed,
    PART: gl.constexpr,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply half of the tokens with what is loaded."""
    up_scales, down_scales, made, shares, output, experts, num_tokens = consumed
    WIDTH: gl.constexpr = stages[0].type.shape[1] // 2
    asked = _ask(experts, num_tokens, PART, WIDTH, TOP_K)
    dtype: gl.constexpr = output.dtype.element_ty
    number = _consume_up(stages, lists, asked, up_scales, made, dtype, PART, INPUTS, SIZE, STAGES)
    _consume_down(
        stages, lists, asked, down_scales, shares, output, number, PART, INPUTS, SIZE, STAGES
    )


@gluon.jit
def _consume_up(
    stages,
    lists,
    asked,
    scales,
    made,
    DTYPE: gl.constexpr,
    PART: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What gates and up projection come to, rounded. Returns the number of the next step."""
    chosen, done, num_chosen = lists[0], lists[1], gl.load(lists[2])
    active, active_scales, capacity = made
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    TILES: gl.constexpr = SIZE // BLOCK
    STEPS: gl.constexpr = INPUTS // BLOCK
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M // 2, 32])
    o_n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RESULT))
    o_m = PART * (BLOCK_M // 2) + gl.arange(0, BLOCK_M // 2, layout=gl.SliceLayout(0, RESULT))
    number = 0
    for unit in range(gl.program_id(0), num_chosen * TILES, gl.num_programs(0)):
        place, tile = unit // TILES, unit % TILES
        expert = gl.load(chosen + place)
        routed = _find(asked, expert, RESULT)
        p_gate = scales + (expert * (2 * TILES) + tile) * STEPS
        p_up = p_gate + TILES * STEPS
        gate_scale, up_scale = gl.load(p_gate), gl.load(p_up)
        b_gate = gl.zeros([BLOCK, BLOCK_M // 2], gl.float32, layout=RESULT)
        b_up = b_gate
        for step in range(STEPS):
            ahead = gl.minimum(step + 1, STEPS - 1)
            next_gate, next_up = gl.load(p_gate + ahead), gl.load(p_up + ahead)
            gates, ups, row_scale = _multiply(stages, number, PART, STAGES, RESULT)
            b_gate += gates * (row_scale * gate_scale)
            b_up += ups * (row_scale * up_scale)
            gate_scale, up_scale = next_gate, next_up
            number += 1
        values, scale = _round(b_gate, b_up, DTYPE)
        row = place * BLOCK_M + o_m
        gl.store(active_scales + tile * capacity + row, scale)
        target = active + row.to(gl.int64)[None, :] * SIZE + (tile * BLOCK + o_n)[:, None]
        gl.store(target, values, mask=(routed >= 0)[None, :])
        fence_async()
        thread_barrier()
        gl.atomic_add(done + place, 1, sem="release")
    return number


@gluon.jit
def _consume_down(
    stages,
    lists,
    asked,
    scales,
    shares,
    output,
    number,
    PART: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The experts' outputs, times the tokens' shares of them, to `output` [P, INPUTS]."""
    chosen, num_chosen = lists[0], gl.load(lists[2])
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    COLUMNS: gl.constexpr = INPUTS // (2 * BLOCK)
    STEPS: gl.constexpr = SIZE // BLOCK
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M // 2, 32])
    o_n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RESULT))
    turns, num_units = share_down(num_chosen, INPUTS, SIZE, BLOCK)
    expert = gl.load(chosen + find_place(0, turns, num_chosen, COLUMNS))
    for index in range(num_units):
        next_expert = gl.load(chosen + find_place(index + 1, turns, num_chosen, COLUMNS))
        tile = find_down(index, turns) % COLUMNS
        p_first = scales + (expert * COLUMNS + tile) * (2 * STEPS)
        p_second = p_first + STEPS
        first_scale, second_scale = gl.load(p_first), gl.load(p_second)
        routed = _find(asked, expert, RESULT)
        share = gl.load(shares + routed, mask=routed >= 0, other=0.0).to(gl.float32)
        b_first = gl.zeros([BLOCK, BLOCK_M // 2], gl.float32, layout=RESULT)
        b_second = b_first
        for step in range(STEPS):
            ahead = gl.minimum(step + 1, STEPS - 1)
            next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
            first, second, row_scale = _multiply(stages, number, PART, STAGES, RESULT)
            b_first += first * (row_scale * first_scale)
            b_second += second * (row_scale * second_scale)
            first_scale, second_scale = next_first, next_second
            number += 1
        target = output + routed.to(gl.int64)[None, :] * INPUTS
        target += (tile * (2 * BLOCK) + o_n)[:, None]
        is_row = (routed >= 0)[None, :]
        gl.store(target, (b_first * share[None, :]).to(output.dtype.element_ty), mask=is_row)
        target += BLOCK
        gl.store(target, (b_second * share[None, :]).to(output.dtype.element_ty), mask=is_row)
        expert = next_expert


@gluon.jit
def _ask(experts, num_tokens, PART: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr):
    """The experts [WIDTH, choices] that a half of the tokens chose, -1 where there is none, and
    their numbers as routed tokens."""
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    o_t = PART * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, BY_TOKEN))[:, None]
    n = gl.arange(0, _MOST_CHOSEN, layout=gl.SliceLayout(0, BY_TOKEN))[None, :]
    routed = o_t * TOP_K + n
    mask = (o_t < num_tokens) & (n < TOP_K)
    return gl.load(experts + routed, mask=mask, other=-1), routed


@gluon.jit
def _find(asked, expert, RESULT: gl.constexpr):
    """Each token of a half as routed to this expert, -1 if it is not."""
    experts, routed = asked
    found = gl.max(gl.where(experts == expert, routed, -1), 1)
    return gl.convert_layout(found, gl.SliceLayout(0, RESULT))


@gluon.jit
def _multiply(stages, number, PART: gl.constexpr, STAGES: gl.constexpr, RESULT: gl.constexpr):
    """A step's two products [BLOCK, tokens of a half], and the scales of its rows."""
    inputs, weights, held, bars = stages
    BLOCK: gl.constexpr = weights.type.shape[1]
    WIDTH: gl.constexpr = inputs.type.shape[1] // 2
    stage = number % STAGES
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    nothing = gl.zeros([BLOCK, WIDTH], gl.float32, layout=RESULT)
    right = inputs.index(stage).slice(PART * WIDTH, WIDTH).permute((1, 0))
    left, other = weights.index(2 * stage), weights.index(2 * stage + 1)
    first = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(other, right, nothing, use_acc=False, is_async=True)
    row_scale = held.index(stage).slice(PART * WIDTH, WIDTH, dim=1).load(RESULT)
    first, second = warpgroup_mma_wait(0, [first, second])
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second, row_scale


@gluon.jit
def _round(gate, up, DTYPE: gl.constexpr):
    """SiLU(gate) * up [BLOCK, tokens], rounded, and the tokens' scales."""
    values = gate * (1 / (1 + gl.exp(-gate))) * up
    # Between the projections activations have 16 bits, whatever computes them.
    values = values.to(DTYPE).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 0) / _LARGEST, _LEAST_SCALE)
    values = gl.minimum(gl.maximum(values / scale[None, :], -_LARGEST), _LARGEST)
    return values.to(gl.float8e4nv), scale
