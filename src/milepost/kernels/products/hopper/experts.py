"""Experts for few tokens on Hopper, in Gluon: both projections in one launch. This is the frame;
`fp8_experts` and `int4_experts` say how what it has loaded is multiplied.

Each chosen expert is multiplied with blocks of its own rows (`gathering`). Every program takes a
share of all experts' up projections, then a share of their down projections, whose weights are
loaded meanwhile so that loading never stops. Before a program multiplies what others have made, it
waits for a counter. All programs are resident and finish their up projections first, so none waits
for ever; two such launches at once on one GPU could.

A unit is the work that a program takes at a time: some outputs of an expert for one block of rows.
It has two parts of equally many rows of weights: of the up projection gates and the ups that belong
to them (without gates, ups and the ups after them), of the down projection outputs and those after
them. TMA loads it in steps, to a ring of stages. A step has two boxes of weights and the rows that
they are multiplied with.

Legend: T tokens, N experts of a token, P = T * N routed tokens, M rows of a block, H hidden size, I
an expert's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import OperandStages, open_bars
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.experts_loading import (
    BLOCK_M,
    MixtureBoxes,
    produce,
)
from milepost.kernels.products.portable.gathering import Gathered, GatheredLists
from milepost.kernels.products.portable.grouped import ExpertRows
from milepost.kernels.products.run import RoutedRows

_M, _BLOCK = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK)


class ExpertScales(NamedTuple):
    """Scales of a product; None for those that a form does not have."""

    weights: Any
    zeros: Any = None
    rows: Any = None

    @staticmethod
    def of(weight: Any, rows: Tensor | None = None) -> ExpertScales:
        return ExpertScales(weight.scales, getattr(weight, "zeros", None), rows)


class MixtureShape(NamedTuple):
    """Both projections, their units and steps; a constant on the device.

    A block of rows has `tiles` units of the up projection, `wide` rows of weights apart, and
    `columns` units of the down projection. A box of weights has `depth` inputs. Both boxes of a
    step have the same inputs and are of two parts if `blocks` is 1; if it is 2, they are of one
    part, and neighbours along the inputs. `up_group` and `down_group` inputs share a scale in four
    bits."""

    inputs: int
    size: int
    is_gated: bool
    tiles: int
    columns: int
    wide: int
    stages: int
    depth: int = BLOCK
    blocks: int = 1
    up_group: int = 0
    down_group: int = 0
    limit: float = 0.0
    """See `RoutedRows.limit`."""

    @staticmethod
    def of(routed: RoutedRows, wide: int, width: int, stages: int, **how: int) -> MixtureShape:
        """Returns the shape of `routed`; a unit of the down projection has `width` outputs."""
        inputs, size = routed.up.num_inputs, routed.size
        cut = size // wide, inputs // width, wide, stages
        return MixtureShape(inputs, size, routed.is_gated, *cut, **how, limit=routed.limit)

    @property
    def up_boxes(self) -> int:  # boxes of a row of weights of the up projection
        return cdiv(self.inputs, self.depth)

    @property
    def down_boxes(self) -> int:
        return cdiv(self.size, self.depth)


class MixtureForm(NamedTuple):
    """Differences between forms of weights: the device function that multiplies, programs per SM,
    and registers of multiplying and of loading threads. All programs must be resident."""

    consume: Any
    programs: int
    registers: int
    loading_registers: int


def launch(
    routed: RoutedRows,
    given: Gathered,
    active: ExpertRows,
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
        ExpertRows(output, routing_weights=routed.routing_weights),
        GatheredLists(given.routed, given.experts, given.counters, given.count),
        len(given.rows),
        SHAPE=shape,
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
    CONSUME: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    """Runs both projections: one warp loads, four multiply."""
    STAGES: gl.constexpr = SHAPE.stages
    inputs, weights = _open_boxes(rows, up, SHAPE)
    if row_scales is None:
        stages = OperandStages(inputs, weights, open_bars(STAGES, 2, 1))
    else:
        # TMA writes whole lines of 128 bytes.
        lines: gl.constexpr = [SHAPE.blocks * STAGES, 1, 32]
        held = gl.allocate_shared_memory(gl.float32, lines, row_scales.layout)
        stages = OperandStages(inputs, weights, open_bars(STAGES, 2, 1), held)
    wait_for_inputs()
    launch_dependents()
    scales = up_scales, down_scales
    first = MixtureBoxes(rows, row_scales, up)
    second = MixtureBoxes(active_rows, active_scales, down)
    gl.warp_specialize(
        [
            (_consume, (CONSUME, stages, lists, scales, active, capacity, output, SHAPE)),
            (produce, (stages, lists, first, second, SHAPE)),
        ],
        [1],
        [LOADING_REGISTERS],
    )


@gluon.jit
def _open_boxes(rows, weight, SHAPE: gl.constexpr):
    """Allocates the ring's boxes of rows [PIECES * STAGES, BLOCK_M, ...] and of weights [2 *
    STAGES, ...]."""
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = rows.block_type.shape[1]
    LINES: gl.constexpr = SHAPE.stages * SHAPE.blocks * SHAPE.depth // WIDTH
    inputs = gl.allocate_shared_memory(rows.dtype, [LINES, _M, WIDTH], rows.layout)
    shape: gl.constexpr = [2 * SHAPE.stages, HEIGHT, _BLOCK]
    return inputs, gl.allocate_shared_memory(weight.dtype, shape, weight.layout)


@gluon.jit
def _consume(
    CONSUME: gl.constexpr, stages, lists, scales, active, capacity, output, SHAPE: gl.constexpr
):
    CONSUME(stages, lists, scales, active, capacity, output, SHAPE)


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
