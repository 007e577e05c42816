"""GEMMs of FP8 weights and few rows on Hopper, in Gluon: `linear.triton_hopper` for float8.

Programs begin to fetch weights while the kernels are under way that make and round the rows. A step
is as deep as a block that shares a scale: its product is scaled and added up in float32 registers,
while what scales the next step is on its way.

Legend: T tokens, I inputs, O outputs, S split-K partials, D scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
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
from milepost.kernels.gemm_gluon import open_stages, produce, store_tile
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Fp8

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_NARROWEST = 8
"""Outputs that a tile can be made wider by: rows of TMA's swizzle."""
_PRODUCER_REGISTERS = 24
_SHARED_BYTES = 200 << 10
_MOST_STAGES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTiles:
    """Of `block_m` tokens, of which those past the last are dropped, and `block_n` outputs."""

    block_m: int
    block_n: int
    split_k: int

    @property
    def mma_m(self) -> int:
        """Rows of weight that are multiplied at a time, the tile's first."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_stages(self) -> int:
        """Steps that are under way at a time."""
        return min(_MOST_STAGES, _SHARED_BYTES // ((self.mma_m + self.block_m) * BLOCK))

    @property
    def num_warps(self) -> int:
        """That multiply: few where each has few tokens."""
        return 4 if self.block_m == 16 else self.mma_m // 16


_ROWS = (16, 32, 64)


def find_tiles(num_tokens: int, weight: Fp8, chip: Chip) -> QuantisedTiles | None:
    """Tiles of the GEMM if this kernel can do it: all SMs get as much of the weight."""
    block_m = next((rows for rows in _ROWS if num_tokens <= rows), 0)
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    is_whole = weight.depth == BLOCK and num_inputs % BLOCK == 0
    if not block_m or not is_whole or weight.input_scale is not None:
        return None
    tiles = QuantisedTiles(block_m=block_m, block_n=64, split_k=1)
    if num_outputs > chip.num_sms * tiles.block_n:
        rounds = triton.cdiv(num_outputs, chip.num_sms * 128)
        block_n = triton.cdiv(num_outputs, chip.num_sms * rounds)
        return replace(tiles, block_n=triton.cdiv(block_n, _NARROWEST) * _NARROWEST)
    split_k, units = 1, triton.cdiv(num_outputs, tiles.block_n)
    while 2 * units * split_k <= chip.num_sms and num_inputs % (4 * split_k * BLOCK) == 0:
        split_k *= 2
    return replace(tiles, split_k=split_k)


def multiply(
    rows: Tensor, row_scales: Tensor, weight: Fp8, output: Tensor, tiles: QuantisedTiles, chip: Chip
) -> None:
    """`output` [T, O], or partials [S, T, O]: `rows` [T, I], rounded with `row_scales` [D, T],
    times `weight` [O, I] transposed."""
    num_units = triton.cdiv(weight.num_outputs, tiles.block_n) * tiles.split_k
    # What is copied at a time has a power of two of rows.
    box = tiles.block_n & -tiles.block_n
    _gemm_kernel[(min(num_units, chip.num_sms),)](
        TensorDescriptor.from_tensor(rows, [tiles.block_m, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, [box, BLOCK], _LAYOUT),
        row_scales,
        weight.scales,
        output,
        len(rows),
        output.stride(-2),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        SCALE_ROWS=weight.rows,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        MMA_M=tiles.mma_m,
        BLOCK=BLOCK,
        SPLIT_K=tiles.split_k,
        STAGES=tiles.num_stages,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=tiles.num_warps,
        maxnreg=96 if tiles.block_m <= 32 else 168,
        **OVERLAPPED,
    )


@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    rows,
    weight,
    row_scales,
    scales,
    output,
    num_tokens,
    output_stride,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MMA_M: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Every so many units, each a tile of outputs and a share of the inputs."""
    TILES: gl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = INPUTS // (SPLIT_K * BLOCK)
    inputs, weights, bars = open_stages(rows, weight, BLOCK_M, MMA_M, BLOCK, STAGES, 1)
    num_units = TILES * SPLIT_K
    let_next_start()
    consumed = (row_scales, scales, output, num_tokens, output_stride, num_units)
    consumed += (inputs, weights, bars)
    produced = (rows, weight, num_units, inputs, weights, bars)
    gl.warp_specialize(
        [
            (_consume, (consumed, OUTPUTS, SCALE_ROWS, BLOCK_N, TILES, STEPS, SPLIT_K, STAGES)),
            (produce, (produced, OUTPUTS, BLOCK_N, TILES, STEPS, STAGES, 1)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    consumed,
    OUTPUTS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply what is loaded. The weights are the left operand: they fill the tensor cores' tall
    side."""
    row_scales, scales, output, num_tokens, output_stride, num_units = consumed[:6]
    inputs, weights, bars = consumed[6:]
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    MMA_M: gl.constexpr = weights.type.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    DEPTHS: gl.constexpr = STEPS * SPLIT_K
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    WIDTH: gl.constexpr = 8 if SPLIT_K == 1 else 4
    LANES: gl.constexpr = min(MMA_M // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    own = gl.arange(0, MMA_M, layout=gl.SliceLayout(1, RESULT))
    token = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, RESULT))
    # Tokens past the last read the first one's scales; they are not stored.
    p_row_scale = row_scales + gl.where(token < num_tokens, token, 0)
    wait_for_inputs()
    number = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        depth = unit // TILES * STEPS
        p_scale = scales + (unit % TILES * BLOCK_N + own) % OUTPUTS // SCALE_ROWS * DEPTHS
        scale = gl.load(p_scale + depth)
        row_scale = gl.load(p_row_scale + depth * num_tokens)
        result = gl.zeros([MMA_M, BLOCK_M], gl.float32, layout=RESULT)
        for step in range(STEPS):
            ahead = gl.minimum(depth + step + 1, DEPTHS - 1)
            next_scale = gl.load(p_scale + ahead)
            next_row_scale = gl.load(p_row_scale + ahead * num_tokens)
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            product = gl.zeros([MMA_M, BLOCK_M], gl.float32, layout=RESULT)
            right = inputs.index(stage).permute((1, 0))
            product = warpgroup_mma(
                weights.index(stage), right, product, use_acc=False, is_async=True
            )
            product = warpgroup_mma_wait(0, [product])
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            result += product * (scale[:, None] * row_scale[None, :])
            scale, row_scale = next_scale, next_row_scale
            number += 1
        values = gl.convert_layout(result.to(output.dtype.element_ty), STORED)
        store_tile(output, values, unit, num_tokens, output_stride, OUTPUTS, BLOCK_N, TILES, STORED)
