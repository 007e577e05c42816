"""GEMMs of few rows on Hopper, in Gluon: Triton's language for programs that place data
themselves.

The weights do not depend on what runs before. So TMA begins to fetch them while the
kernel is under way whose output is multiplied, which is when memory would be idle. One warp has
steps brought to shared memory, others multiply; they do not pause between one tile and the next.

`hopper_tiles` says which GEMMs these are and how wide their tiles.

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

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

from milepost.kernels.platform.gluon import launch_dependents
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.hopper.gemm_parts import open_stages, produce, store_tile
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import RAW_BLOCK_K as BLOCK_K
from milepost.kernels.products.tiles import RawTiles

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PRODUCER_REGISTERS = 24


def run(given: Multiplication, tiles: RawTiles) -> Tensor:
    """Multiplies up to 64 rows by raw weights."""
    hidden, weight = given.values, given.weight
    assert isinstance(weight, Raw), "the kernel's form"
    output = given.new_output(tiles.split_k)
    num_units = triton.cdiv(weight.num_outputs, tiles.block_n) * tiles.split_k
    # What is copied at a time has a power of two of rows.
    box = tiles.block_n & -tiles.block_n
    _gemm_kernel[(min(num_units, tiles.programs * given.chip.num_sms),)](
        TensorDescriptor.from_tensor(hidden, [tiles.block_m, BLOCK_K], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, [box, BLOCK_K], _LAYOUT),
        output,
        len(hidden),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        MMA_M=tiles.mma_m,
        BLOCK_K=BLOCK_K,
        SPLIT_K=tiles.split_k,
        STAGES=tiles.num_stages,
        LAUNCH_DEPENDENTS=given.launch_dependents,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=tiles.num_warps,
        maxnreg=_registers(tiles),
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


def _registers(tiles: RawTiles) -> int:
    """Of a thread on average: few, so that what runs before and behind finds room beside it."""
    held = tiles.block_m * tiles.mma_m // (32 * tiles.num_warps)
    return 48 if held <= 16 else 64 if held <= 32 else 96


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    hidden,
    weight,
    output,
    num_tokens,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MMA_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    LAUNCH_DEPENDENTS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Every so many units, each a tile of outputs and a share of the inputs."""
    TILES: gl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = INPUTS // (SPLIT_K * BLOCK_K)
    inputs, weights, bars = open_stages(hidden, weight, BLOCK_M, MMA_M, BLOCK_K, STAGES)
    num_units = TILES * SPLIT_K
    if LAUNCH_DEPENDENTS:
        launch_dependents()
    consumed = (output, num_tokens, num_units, inputs, weights, bars)
    produced = (hidden, weight, num_units, inputs, weights, bars)
    gl.warp_specialize(
        [
            (_consume, (consumed, OUTPUTS, BLOCK_N, TILES, STEPS, SPLIT_K, STAGES)),
            (produce, (produced, BLOCK_N, TILES, STEPS, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    consumed,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply what is loaded. The weights are the left operand: they fill the tensor cores' tall
    side. A step is used up once the multiplications of the next are under way."""
    output, num_tokens, num_units, inputs, weights, bars = consumed
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    MMA_M: gl.constexpr = weights.type.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    WIDTH: gl.constexpr = 8 if SPLIT_K == 1 else 4
    LANES: gl.constexpr = min(MMA_M // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    number = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        result = gl.zeros([MMA_M, BLOCK_M], gl.float32, layout=RESULT)
        for step in range(STEPS):
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            right = inputs.index(stage).permute((1, 0))
            result = warpgroup_mma(weights.index(stage), right, result, is_async=True)
            result = warpgroup_mma_wait(1, [result])
            if step > 0:
                _give_back(bars, number - 1, STAGES)
            number += 1
        result = warpgroup_mma_wait(0, [result])
        _give_back(bars, number - 1, STAGES)
        values = gl.convert_layout(result.to(output.dtype.element_ty), STORED)
        store_tile(output, values, unit, num_tokens, OUTPUTS, BLOCK_N, TILES, STORED)


@gluon.jit
def _give_back(bars, number, STAGES: gl.constexpr):
    """The stage of this step may be loaded again."""
    mbarrier.arrive(bars.index(STAGES + number % STAGES), count=1)
