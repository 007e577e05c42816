"""Triton: the experts' matrix-vector products, for so few tokens that hardly two share an expert.

Every routed token reads its expert's matrices by itself: nothing has to be grouped first. Each
program rounds its row on the way if the form asks for that.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I an expert's size.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.products.forms.matrix import Form, Raw
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.expert_parts import ExpertWeight, find_scales
from milepost.kernels.products.portable.gemm_step import factors
from milepost.kernels.products.portable.quantised_gemv import (
    FEW_WEIGHTS,
    WEIGHTS,
    cut_up,
    dot,
    load_row,
    load_weights,
)
from milepost.kernels.products.run_experts import RoutedRows

_SMALL = 1024
"""Size of an expert up to which its outputs are found eight at a time."""


class RowCut(NamedTuple):
    """Tiles of a weight and constants of its form; a constant on the device."""

    block_n: int
    """Outputs of a program."""
    block: int
    """Inputs of a block."""
    block_d: int = 1
    """Blocks of a step."""
    group: int = 0
    depths: int = 0
    scale_rows: int = 1
    is_native: bool = True
    """The scales' constants: see `gemm_step.constants`."""
    num_warps: int = 4


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    output = routed.new_output(routed.experts.shape[1])
    active = routed.values.new_empty(routed.num_routed, routed.size)
    up, down = routed.up, routed.down
    if isinstance(up, Raw) and isinstance(down, Raw):
        check_rows(hidden=routed.values)
        check_contiguous(up=up.values, down=down.values, experts=routed.experts)
        up_cut = RowCut(block_n=4, block=2048 if up.num_inputs <= 2048 else 1024)
        is_small = routed.size <= _SMALL
        down_cut = RowCut(block_n=8, block=512) if is_small else RowCut(block_n=2, block=2048)
    else:
        up_cut = _cut(up, routed, WEIGHTS, 1 + routed.is_gated)
        down_cut = _cut(down, routed, FEW_WEIGHTS)
    project_up(routed, active, up_cut)
    project_down(active, routed, output, down_cut)
    return output


def _cut(weight: Form, routed: RoutedRows, num_weights: int, num_matrices: int = 1) -> RowCut:
    assert not isinstance(weight, Raw), "experts have one form"
    known = cut_up(weight, routed.chip, num_weights, num_matrices)
    known["is_native"] = known.pop("NATIVE")
    return RowCut(**{name.lower(): value for name, value in known.items()})


def project_up(routed: RoutedRows, active: Tensor, cut: RowCut) -> None:
    """`active` [P, I]: the routed tokens' rows through `up` and the activation."""
    hidden, size = routed.values, active.shape[1]
    _project_kernel[(triton.cdiv(size, cut.block_n), routed.num_routed)](
        hidden,
        routed.experts,
        None,
        ExpertWeight.of(routed.up, routed.chip),
        active,
        hidden.stride(0),
        TOP_K=routed.experts.shape[1],
        INPUTS=hidden.shape[1],
        OUTPUTS=size,
        GATED=routed.is_gated,
        MULTIPLY=_multiply_raw if isinstance(routed.up, Raw) else _multiply_quantised,
        CUT=cut,
        num_warps=cut.num_warps,
        **OVERLAPPED,
    )


def project_down(active: Tensor, routed: RoutedRows, output: Tensor, cut: RowCut) -> None:
    """`output` [P, H]: the routing weights times `active` [P, I] through `down`."""
    num_outputs = output.shape[-1]
    _project_kernel[(triton.cdiv(num_outputs, cut.block_n), routed.num_routed)](
        active,
        routed.experts,
        routed.routing_weights,
        ExpertWeight.of(routed.down, routed.chip),
        output,
        None,
        TOP_K=1,
        INPUTS=active.shape[1],
        OUTPUTS=num_outputs,
        GATED=False,
        MULTIPLY=_multiply_raw if isinstance(routed.down, Raw) else _multiply_quantised,
        CUT=cut,
        num_warps=cut.num_warps,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _project_kernel(
    rows,
    experts,
    routing_weights,
    weight,
    output,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    MULTIPLY: tl.constexpr,
    CUT: tl.constexpr,
):
    """Makes outputs of one routed token. Rows are tokens', `stride` apart; or, without a stride,
    routed tokens'."""
    launch_dependents()
    wait_for_inputs()
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    o_n = tl.program_id(0) * CUT.block_n + tl.arange(0, CUT.block_n)
    if stride is None:
        p_x = rows + routed * INPUTS
    else:
        p_x = rows + (routed // TOP_K).to(tl.int64) * stride
    b_up, b_gate = MULTIPLY(p_x, weight, expert, o_n, INPUTS, OUTPUTS, GATED, CUT)
    if routing_weights is None:
        b_o = activate(b_up, b_gate, GATED)
    else:
        b_o = b_up * tl.load(routing_weights + routed).to(tl.float32)
    b_o = b_o.to(output.dtype.element_ty)
    tl.store(output + routed.to(tl.int64) * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)


@triton.jit
def _multiply_raw(
    p_x,
    weight,
    expert,
    o_n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Multiplies a row by the outputs `o_n` [N], and with their gates if GATED."""
    BLOCK: tl.constexpr = CUT.block
    HEIGHT: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    o_k = tl.arange(0, BLOCK)
    p_x += o_k
    column = o_n % OUTPUTS
    # Up rows stand after the gates'.
    p_gate = weight.numbers + expert * (HEIGHT * INPUTS) + column[:, None] * INPUTS + o_k[None, :]
    p_up = p_gate + (HEIGHT - OUTPUTS) * INPUTS
    gates = tl.zeros([column.shape[0], BLOCK], tl.float32)
    ups = tl.zeros([column.shape[0], BLOCK], tl.float32)
    for i_k in tl.static_range(0, INPUTS, BLOCK):
        is_input = i_k + o_k < INPUTS
        b_x = tl.load(p_x + i_k, mask=is_input, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            gates += b_gate.to(tl.float32) * b_x
        b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
        ups += b_up.to(tl.float32) * b_x
    return tl.sum(ups, 1), tl.sum(gates, 1)


@triton.jit
def _multiply_quantised(
    p_x,
    weight,
    expert,
    o_n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Multiplies as `_multiply_raw`, block by block."""
    BLOCK: tl.constexpr = CUT.block
    BLOCK_D: tl.constexpr = CUT.block_d
    GROUP: tl.constexpr = CUT.group
    NATIVE: tl.constexpr = CUT.is_native
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    HEIGHT: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    column = o_n % OUTPUTS
    # Up rows stand after the gates'.
    up_row = column + (HEIGHT - OUTPUTS)
    own = weight.numbers + expert * (HEIGHT * PITCH)
    gate_scale, gate_zero = find_scales(
        weight, expert, column, HEIGHT, GROUP, CUT.depths, CUT.scale_rows
    )
    up_scale, up_zero = find_scales(
        weight, expert, up_row, HEIGHT, GROUP, CUT.depths, CUT.scale_rows
    )
    gates = tl.zeros([column.shape[0]], tl.float32)
    ups = tl.zeros([column.shape[0]], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        b_up = load_weights(own + up_row * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        if GATED:
            b_gate = load_weights(own + column * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        b_x, b_y, b_sum = load_row(p_x, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        if GATED:
            gates += dot(
                b_gate, b_x, b_y, b_sum, gate_scale, gate_zero, i_d,
                INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
            )  # fmt: skip
        ups += dot(
            b_up, b_x, b_y, b_sum, up_scale, up_zero, i_d,
            INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
        )  # fmt: skip
    if GROUP < 0:
        gates *= factors(gate_zero)
        ups *= factors(up_zero)
    return ups, gates
