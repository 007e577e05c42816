"""GEMMs of four-bit weights and 2 to 32 rows on Hopper, in Gluon (see `nibbles_gluon`).

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.device import Chip
from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Int4
from milepost.kernels.quantised.nibbles_gluon import (
    accumulate,
    begin,
    can_copy,
    products_layout,
    rows_copied,
    weights_copied,
    weights_layout,
)

_BLOCK = gl.constexpr(BLOCK)
_BLOCK_N, _SOME_N, _FEW_N = 128, 64, 32
"""Outputs of a program: of products with many, with some and with few, that fewer programs would
leave SMs idle of."""
_PROGRAMS = 2
"""That an SM should have, at least."""
_LEAST_SHARE = 4 * BLOCK
"""Inputs of a program: of a single step there is no loop, and Triton 3.6 fails at that."""
_ROWS = (8, 16, 32)
"""Of 64 rows each warp reads so much of them from shared memory that Triton's kernel is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NibbleTiles:
    """Of `block_m` tokens, of which those past the last are dropped. Two programs have room in an
    SM's shared memory, or more."""

    block_m: int
    split_k: int
    whole_n: int
    """Outputs of a program that multiplies all inputs."""

    @property
    def block_n(self) -> int:
        if self.split_k == 1:
            return self.whole_n
        return _SOME_N if self.block_m <= 8 else _BLOCK_N

    @property
    def num_warps(self) -> int:
        return min(4, self.block_n // 16)

    @property
    def num_blocks(self) -> int:
        """Of inputs that are multiplied at a time."""
        return 2 if self.block_m <= 16 else 1

    @property
    def num_stages(self) -> int:
        return 4 if self.block_m <= 16 else 6


def suits(weight: Int4) -> bool:
    """Whether a block of inputs has one scale, and steps are whole."""
    is_whole = weight.num_inputs % (2 * BLOCK) == 0
    return weight.group % BLOCK == 0 and is_whole and weight.num_inputs >= _LEAST_SHARE


def find_tiles(hidden: Tensor, weight: Int4, chip: Chip) -> NibbleTiles | None:
    """Tiles of `hidden` [T, I] times the weight if this kernel can do it, so many that they keep
    all SMs loading."""
    block_m = next((rows for rows in _ROWS if len(hidden) <= rows), 0)
    if not block_m or not suits(weight) or not can_copy(hidden):
        return None
    wanted = _PROGRAMS * chip.num_sms
    widths = (width for width in (_BLOCK_N, _SOME_N) if weight.num_outputs > width * (wanted - 1))
    whole_n = next(widths, _FEW_N)
    # Partials of few outputs cost less than narrow programs do.
    split_n = whole_n if whole_n > _FEW_N else _BLOCK_N
    split_k, num_tiles = 1, triton.cdiv(weight.num_outputs, split_n)
    while num_tiles * split_k < wanted:
        share, rest = divmod(weight.num_inputs, 2 * split_k)
        if rest or share < _LEAST_SHARE or share % (2 * BLOCK):
            break
        split_k *= 2
    return NibbleTiles(block_m=block_m, split_k=split_k, whole_n=whole_n)


def multiply(hidden: Tensor, weight: Int4, output: Tensor, tiles: NibbleTiles) -> None:
    """`output` [T, O], or partials [S, T, O]: `hidden` [T, I] times `weight` [O, I] transposed."""
    _gemm_kernel[(triton.cdiv(weight.num_outputs, tiles.block_n), tiles.split_k)](
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
    let_next_start()
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
