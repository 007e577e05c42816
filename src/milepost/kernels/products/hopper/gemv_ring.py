"""Products of one row with large FP8 weights on Hopper, in Gluon (see `gemv_parts`).

A program has several units, each of 16 rows of the weights. While it multiplies, the next blocks
are on their way to a ring of stages in shared memory; the first ones are loaded while the kernels
before still run. Two programs share an SM, so that one loads while the other adds up.

Legend: I inputs, O outputs, B blocks of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box, thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper import gemv_parts as parts
from milepost.kernels.products.run import Multiplication

_PROGRAMS, _STAGES, _REGISTERS = 2, 3, 120
"""Programs per SM, and the stages and registers that allow them."""
_BOXES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
_PARTS, _TILE, _BLOCK = gl.constexpr(parts.PARTS), gl.constexpr(parts.TILE), gl.constexpr(BLOCK)
_OUTPUTS = gl.constexpr(parts.OUTPUTS_LAYOUT.value)


def run(given: Multiplication, tiles: None) -> Tensor:
    """Multiplies one row by large FP8 weights. Gates and ups are the halves of gated ones."""
    weight, output, is_gated = given.weight_as(Fp8), given.output(), given.is_gated
    num_units = weight.num_outputs // parts.TILE
    shape = parts.RowShape.of(weight, output.shape[1], is_gated=is_gated)
    values = weight.values.view(torch.uint8).view(-1, parts.PARTS, weight.num_inputs // parts.PARTS)
    box = [parts.TILE // (1 + is_gated), parts.PARTS, BLOCK]
    _ring_kernel[(min(num_units, _PROGRAMS * given.chip.num_sms),)](
        given.values,
        TensorDescriptor.from_tensor(values, box, _BOXES),
        weight.scales,
        given.bias,
        output,
        UNITS=num_units,
        STAGES=_STAGES,
        SHAPE=shape,
        num_warps=parts.PARTS,
        maxnreg=_REGISTERS,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit
def _ring_kernel(
    hidden,
    weight,
    scales,
    bias,
    output,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Multiplies units of 16 outputs, or of eight and their gates."""
    EACH: gl.constexpr = _TILE // 2 if SHAPE.is_gated else _TILE
    B: gl.constexpr = SHAPE.part_blocks
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, _TILE, _PARTS, _BLOCK], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(STAGES):
        mbarrier.init(bars.index(bar), count=1)
    thread_barrier()
    launch_dependents()
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (UNITS - first + step - 1) // step
    for number in range(gl.minimum(count * B, STAGES)):
        at = (first + number // B * step) * EACH
        _fetch(weight, ring, bars, number, at, number % B, SHAPE)
    wait_for_inputs()
    kept, kept_scales = parts.keep_row(hidden, SHAPE)
    # A box holds one row's parts after the other's.
    o_m = gl.arange(0, _TILE * _PARTS, gl.SliceLayout(1, parts.PRODUCTS))
    inside, part = o_m // _PARTS, o_m % _PARTS
    for i_unit in range(count):
        at = (first + i_unit * step) * EACH
        row = at + inside % EACH + inside // EACH * SHAPE.outputs
        p_scale = scales + row // SHAPE.scale_rows * SHAPE.blocks + part * B
        scale = ()
        for b in gl.static_range(B):
            scale += (gl.load(p_scale + b),)
        acc = gl.zeros([_TILE * _PARTS, 8], gl.float32, parts.PRODUCTS)
        for b in gl.static_range(B):
            number = i_unit * B + b
            mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
            held = ring.index(number % STAGES).reshape([_TILE * _PARTS, _BLOCK])
            b_w = held.load(parts.operand_layout(0))
            # The stage is loaded anew once all have read it.
            thread_barrier()
            ahead = number + STAGES
            if ahead < count * B:
                to = (first + ahead // B * step) * EACH
                _fetch(weight, ring, bars, ahead, to, ahead % B, SHAPE)
            acc = parts.add_block(acc, b_w, kept[b], kept_scales[b], scale[b])
        total = gl.sum(gl.reshape(parts.own_products(acc, part), [1, _TILE, _PARTS]), 2)
        _store(output, bias, total, at, SHAPE.is_gated)


@gluon.jit
def _fetch(weight, ring, bars, number, row, b, SHAPE: gl.constexpr):
    """Starts to load block b of each part, for the rows from `row` on; ups stand after all
    gates."""
    STAGES: gl.constexpr = ring.shape[0]
    bar, stage = bars.index(number % STAGES), ring.index(number % STAGES)
    mbarrier.expect(bar, _TILE * _PARTS * _BLOCK)
    if SHAPE.is_gated:
        HALF: gl.constexpr = _TILE // 2
        load_box(weight, [row, 0, b * _BLOCK], bar, stage.slice(0, HALF))
        load_box(weight, [row + SHAPE.outputs, 0, b * _BLOCK], bar, stage.slice(HALF, HALF))
    else:
        load_box(weight, [row, 0, b * _BLOCK], bar, stage)


@gluon.jit
def _store(output, bias, total, at, GATED: gl.constexpr):
    """Stores a unit's outputs, given its sums [1, TILE]."""
    LINE: gl.constexpr = gl.SliceLayout(0, _OUTPUTS)
    if GATED:
        HALF: gl.constexpr = _TILE // 2
        pair = gl.convert_layout(gl.reshape(total, [2, HALF]), _OUTPUTS)
        is_gate = gl.arange(0, 2, gl.SliceLayout(1, _OUTPUTS))[:, None] == 0
        gates = gl.sum(gl.where(is_gate, pair, 0.0), 0)
        b_o = activate(gl.sum(gl.where(is_gate, 0.0, pair), 0), gates, True)
        o_n = at + gl.arange(0, HALF, LINE)
    else:
        b_o = gl.convert_layout(gl.reshape(total, [_TILE]), LINE)
        o_n = at + gl.arange(0, _TILE, LINE)
    if bias is not None:
        b_o += gl.load(bias + o_n).to(gl.float32)
    gl.store(output + o_n, b_o.to(output.dtype.element_ty))
