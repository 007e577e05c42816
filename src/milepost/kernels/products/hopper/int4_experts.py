"""Experts with int4 weights for few tokens on Hopper, in Gluon: int4's part of `experts`.

A unit is 128 rows of an expert's weights in two parts of 64: of the up projection gates and the ups
that belong to them, or without gates 128 ups; of the down projection 128 outputs. A step is 256
inputs of a unit: TMA brings pieces of 128 bytes, for no wider ones fit what banks of shared memory
are swizzled by. Weights come to shared memory as they are, and are unpacked where they are
multiplied (`int4_fragments`).

Legend: T tokens, N experts of a token, X experts, M rows of a block, H hidden size, I an expert's
size.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import boxes_of, thread_barrier
from milepost.kernels.platform.numerics import activate
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper import experts
from milepost.kernels.products.hopper import experts_loading as loading
from milepost.kernels.products.hopper import int4_fragments as fragments
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.portable.grouped import ExpertRows
from milepost.kernels.products.run import RoutedRows

_STAGES = 3
_PRODUCTS = gl.constexpr(fragments.PRODUCTS.value)
_BLOCK, _HALF, _M = gl.constexpr(BLOCK), gl.constexpr(fragments.HALF), gl.constexpr(loading.BLOCK_M)


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down = routed.weights(Int4)
    given = gather(routed.values, None, routed.experts, routed.num_experts, loading.BLOCK_M)
    active = routed.values.new_empty(len(given.rows), routed.size)
    boxes = _boxes(given.rows, up), _boxes(active, down)
    wide = fragments.HALF if routed.is_gated else BLOCK
    how = {"depth": 2 * BLOCK, "up_group": up.group, "down_group": down.group}
    shape = experts.MixtureShape.of(routed, wide, BLOCK, _STAGES, **how)
    return experts.launch(routed, given, ExpertRows(active), boxes, shape, FORM)


def _boxes(rows: Tensor, weight: Int4) -> loading.MixtureBoxes:
    weights = boxes_of(weight.packed, fragments.HALF, BLOCK)
    return loading.MixtureBoxes(boxes_of(rows, loading.BLOCK_M, fragments.HALF), None, weights)


@gluon.constexpr_function
def _up_of(shape):
    apart = shape.size if shape.is_gated else fragments.HALF
    return fragments.halve_steps(shape.inputs, shape.up_group, apart)


@gluon.constexpr_function
def _down_of(shape):
    return fragments.halve_steps(shape.size, shape.down_group, fragments.HALF)


@gluon.jit
def _consume(stages, lists, scales, active, capacity, output, SHAPE: gl.constexpr):
    """Multiplies what is loaded."""
    scaled = fragments.scales_of(scales[1], _down_of(SHAPE))
    begun = _begin_down(lists, scaled, SHAPE)
    number = _consume_up(stages, lists, scales[0], active.base, SHAPE)
    _consume_down(stages, lists, scaled, output, begun, number, SHAPE)


@gluon.jit
def _consume_up(stages, lists, scales, active, SHAPE: gl.constexpr):
    """Computes activations; returns the number of the next step."""
    UP: gl.constexpr = _up_of(SHAPE)
    TILES: gl.constexpr = SHAPE.tiles
    HEIGHT: gl.constexpr = 2 * SHAPE.size if SHAPE.is_gated else SHAPE.size
    owners, num_blocks = lists.experts, gl.load(lists.count)
    num_units, stride = num_blocks * TILES, gl.num_programs(0)
    own = fragments.scales_of(scales, UP)
    first = gl.minimum(gl.program_id(0), num_units - 1)
    expert = gl.load(owners + first // TILES)
    next_expert = gl.load(owners + gl.minimum(first + stride, num_units - 1) // TILES)
    place = (expert * HEIGHT + first % TILES * SHAPE.wide) * UP.words
    held = fragments.load_scales(own, place, 0, UP)
    number = 0
    for unit in range(gl.program_id(0), num_units, stride):
        following = gl.minimum(unit + stride, num_units - 1)
        next_place = (next_expert * HEIGHT + following % TILES * SHAPE.wide) * UP.words
        # Looked up two units ahead, or each would begin with waiting.
        next_expert = gl.load(owners + gl.minimum(following + stride, num_units - 1) // TILES)
        gate, up, held = fragments.multiply(stages, held, own, place, next_place, number, UP)
        number += UP.steps
        if SHAPE.is_gated:
            _store_active(active, activate(up, gate, True, SHAPE.limit), unit, 0, SHAPE)
        else:
            _store_active(active, activate(gate, gate, False), unit, 0, SHAPE)
            _store_active(active, activate(up, up, False), unit, _HALF, SHAPE)
        thread_barrier()
        gl.atomic_add(lists.counters + unit // TILES, 1, sem="release")
        place = next_place
    return number


@gluon.jit
def _store_active(active, values, unit, BEYOND: gl.constexpr, SHAPE: gl.constexpr):
    """Stores a part's activations, which begin BEYOND the unit's first one. Rows without a token
    are stored too."""
    o_n = fragments.outputs_of(gl.SliceLayout(1, _PRODUCTS))
    row = unit // SHAPE.tiles * _M + fragments.rows_of(gl.SliceLayout(0, _PRODUCTS), _up_of(SHAPE))
    target = active + row.to(gl.int64)[None, :] * SHAPE.size
    target += (unit % SHAPE.tiles * SHAPE.wide + BEYOND + o_n)[:, None]
    gl.store(target, values.to(active.dtype.element_ty))


@gluon.jit
def _begin_down(lists, scaled, SHAPE: gl.constexpr):
    """Returns a program's units of the down projection, and what the first unit needs: loaded
    before the up projection, so that nothing waits in between."""
    DOWN: gl.constexpr = _down_of(SHAPE)
    owners, num_blocks = lists.experts, gl.load(lists.count)
    share, num_units = loading.share_down(num_blocks, SHAPE)
    expert = gl.load(owners + loading.find_place(0, share, num_blocks, SHAPE))
    next_expert = gl.load(owners + loading.find_place(1, share, num_blocks, SHAPE))
    own = _load_routed(lists.routed, loading.find_place(0, share, num_blocks, SHAPE), SHAPE)
    column = loading.find_down(0, share) % SHAPE.columns * _BLOCK
    place = (expert * SHAPE.inputs + column) * DOWN.words
    return share, num_units, next_expert, own, place, fragments.load_scales(scaled, place, 0, DOWN)


@gluon.jit
def _load_routed(routed, block, SHAPE: gl.constexpr):
    """Returns the routed tokens of a block's rows [M]."""
    o_m = fragments.rows_of(gl.SliceLayout(0, _PRODUCTS), _down_of(SHAPE))
    return gl.load(routed + block * _M + o_m)


@gluon.jit
def _consume_down(stages, lists, scaled, output, begun, number, SHAPE: gl.constexpr):
    """Stores the experts' outputs, times their routing weights, to `output` [P, INPUTS]."""
    DOWN: gl.constexpr = _down_of(SHAPE)
    owners, num_blocks = lists.experts, gl.load(lists.count)
    turns, num_units, next_expert, next_own, place, held = begun
    o_n = fragments.outputs_of(gl.SliceLayout(1, _PRODUCTS))
    for index in range(num_units):
        own = next_own
        weight = gl.load(output.routing_weights + own, mask=own >= 0, other=0.0).to(gl.float32)
        column = loading.find_down(index + 1, turns) % SHAPE.columns * _BLOCK
        next_place = (next_expert * SHAPE.inputs + column) * DOWN.words
        next_expert = gl.load(owners + loading.find_place(index + 2, turns, num_blocks, SHAPE))
        next_block = loading.find_place(index + 1, turns, num_blocks, SHAPE)
        next_own = _load_routed(lists.routed, next_block, SHAPE)
        first, second, held = fragments.multiply(
            stages, held, scaled, place, next_place, number, DOWN
        )
        number += DOWN.steps
        column = loading.find_down(index, turns) % SHAPE.columns * _BLOCK
        experts.store_routed(output.base, own, weight, first, second, column + o_n, SHAPE)
        place = next_place


FORM = experts.MixtureForm(_consume, 3, 80, 24)
