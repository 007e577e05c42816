"""Triton: products of one row with quantised weights, where reading the weights is what costs.

Every program rounds its row on the way if the form asks for that, which needs no launch of its own.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Quantised
from milepost.kernels.products.portable.gemm_step import constants, factors, operands
from milepost.kernels.products.portable.gemv_parts import dot, load_row, load_weights
from milepost.kernels.products.run_products import Multiplication

WEIGHTS, FEW_WEIGHTS = 1 << 15, 1 << 14
"""Weights that a program reads at a time. The more, the less it matters that each rounds its row;
small matrices, and experts' last projections, need more programs."""
_SMALL = 1 << 24
"""Fewest weights of a matrix that is not small."""
_FOUR_BIT_WEIGHTS = 1 << 13
"""Weights of four bits that a program reads at a time: rows are not rounded, and more programs
share the work of unpacking."""
_DEPTH = 2048
"""Inputs of a step."""


def cut_up(
    weight: Quantised, chip: Chip, num_weights: int, num_matrices: int = 1
) -> dict[str, int]:
    """Returns the outputs and blocks of inputs of a step, and the weight's constants."""
    depth = min(triton.next_power_of_2(weight.num_inputs), _DEPTH)
    known, has_four_bits = constants(weight, chip), not isinstance(weight, Fp8)
    num_weights = _FOUR_BIT_WEIGHTS if has_four_bits else num_weights
    return {
        "BLOCK_N": num_weights // (num_matrices * depth),
        "BLOCK_D": depth // BLOCK,
        "BLOCK": BLOCK,
        "num_warps": 4 if has_four_bits else 8,
        **{name: known[name] for name in ("GROUP", "DEPTHS", "SCALE_ROWS", "NATIVE")},
    }


def run(given: Multiplication, tiles: None) -> Tensor:  # noqa: ARG001
    """Multiplies by quantised weights, each row for itself."""
    hidden, weight, output, chip = given.values, given.weight, given.output(), given.chip
    assert isinstance(weight, Quantised), "the kernel's forms"
    is_small = weight.num_outputs * hidden.shape[1] < _SMALL
    cut = cut_up(weight, chip, FEW_WEIGHTS if is_small else WEIGHTS)
    _dense_kernel[(triton.cdiv(weight.num_outputs, cut["BLOCK_N"]), len(hidden))](
        hidden,
        *operands(weight, chip),
        given.bias,
        output,
        hidden.stride(0),
        output.stride(0),
        INPUTS=hidden.shape[1],
        OUTPUTS=weight.num_outputs,
        **cut,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _dense_kernel(
    hidden,
    weight,
    scales,
    zeros,
    bias,
    output,
    stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    column = o_n % OUTPUTS
    p_w = weight + column.to(tl.int64) * PITCH
    p_scale = scales + column // SCALE_ROWS * DEPTHS
    p_zero = None if zeros is None else zeros + column * (DEPTHS if GROUP > 0 else 1)
    b_w = load_weights(p_w, 0, INPUTS, BLOCK_D, BLOCK, GROUP)
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        if i_d > 0:
            b_w = load_weights(p_w, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        row = hidden + token * stride
        b_x, b_y, b_sum = load_row(row, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        acc += dot(
            b_w, b_x, b_y, b_sum, p_scale, p_zero, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE
        )
    if GROUP < 0:
        acc *= factors(p_zero)
    is_column = o_n < OUTPUTS
    if bias is not None:
        acc += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = acc.to(output.dtype.element_ty)
    tl.store(output + token * output_stride + o_n, b_o, mask=is_column)
