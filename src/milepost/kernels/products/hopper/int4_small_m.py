"""GEMMs of four-bit weights and 2 to 32 rows on Hopper, in Gluon (see `nibbles_gluon`).

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper.int4_parts import (
    accumulate,
    begin,
    products_layout,
    rows_copied,
    weights_copied,
    weights_layout,
)
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import Int4Tiles

_BLOCK = gl.constexpr(BLOCK)


def run(given: Multiplication, tiles: Int4Tiles) -> Tensor:
    """Multiplies 2 to 32 rows by four-bit weights."""
    hidden, weight = given.values, given.weight
    assert isinstance(weight, Int4), "the kernel's form"
    output = given.output(tiles.split_k)
    _gemm_kernel[(cdiv(weight.num_outputs, tiles.block_n), tiles.split_k)](
        hidden,
        weight.packed,
        weight.scales,
        weight.zeros,
        output,
        len(hidden),
        hidden.stride(0),
        output.stride(-2),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        GROUP=weight.group,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCKS=tiles.num_blocks,
        STEPS=weight.num_inputs // (tiles.split_k * tiles.num_blocks * BLOCK),
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    hidden,
    weight,
    scales,
    zeros,
    output,
    num_tokens,
    stride,
    output_stride,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    PRODUCTS: gl.constexpr = products_layout(WARPS)
    WEIGHTS: gl.constexpr = weights_layout(WARPS)
    first = gl.program_id(1) * (BLOCKS * STEPS * _BLOCK)
    # Outputs past the last wrap, rows past the last repeat it: neither is stored.
    tile = gl.program_id(0) * BLOCK_N
    row = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, weights_copied(BLOCKS, WARPS)))) % OUTPUTS
    p_w = weight + row.to(gl.int64) * (INPUTS // 2)
    weights = begin(p_w, first, BLOCKS, STEPS, STAGES)
    scaled = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))) % OUTPUTS
    p_scale = scales + scaled * (INPUTS // GROUP)
    shifted = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WEIGHTS))) % OUTPUTS
    p_zero = zeros + shifted * (INPUTS // GROUP)
    wait_for_inputs()
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(1, rows_copied(BLOCKS, WARPS)))
    p_x = hidden + gl.minimum(token, num_tokens - 1).to(gl.int64) * stride
    result = accumulate(weights, p_x, p_w, p_scale, p_zero, first, BLOCKS, STEPS, GROUP)
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    values = gl.convert_layout(result, STORED).to(output.dtype.element_ty)
    o_n = tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORED))[:, None]
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORED))[None, :]
    target = output + (gl.program_id(1) * num_tokens + o_m) * output_stride + o_n
    gl.store(target, values, mask=(o_n < OUTPUTS) & (o_m < num_tokens))
