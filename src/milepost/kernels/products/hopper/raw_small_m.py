"""GEMMs of few rows with raw weights on Hopper, in Gluon: their part of `small_m`.

The tensor cores add up each output's inputs one after the other, so the product of a few rows takes
as long as that chain wherever tiles are narrow. A step then has two lines of inputs, and the warps
that multiply wait for barriers half as often.

Legend: T tokens, I inputs, O outputs, S split-K partials; N outputs and M rows of a stage.
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

from milepost.kernels.products.forms import Raw
from milepost.kernels.products.hopper.small_m import (
    SmallBoxes,
    SmallProduct,
    SmallShape,
    launch,
    produce,
    store,
)
from milepost.kernels.products.hopper.tiles import RAW_BLOCK_K, RawTiles
from milepost.kernels.products.run import Multiplication

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def run(given: Multiplication, tiles: RawTiles) -> Tensor:
    """Multiplies up to 64 rows by raw weights."""
    weight, hidden, output = given.weight, given.values, given.output(tiles.split_k)
    assert isinstance(weight, Raw), "the kernel's form"
    how = {"mma_n": tiles.mma_m, "launch_dependents": given.launch_dependents}
    how |= {"block_m": tiles.block_m, "lines": tiles.lines}
    shape = SmallShape.of(weight, tiles, RAW_BLOCK_K, **how)
    # Boxes have a power of two of rows.
    box = [tiles.block_n & -tiles.block_n, RAW_BLOCK_K]
    boxes = SmallBoxes(
        TensorDescriptor.from_tensor(hidden, [tiles.block_m, RAW_BLOCK_K], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, box, _LAYOUT),
    )
    stride = None if output.is_contiguous() else output.stride(0)
    product = SmallProduct(None, output, len(hidden), stride)
    # Few registers, so that the kernels before and after fit beside it.
    held = tiles.block_m * tiles.mma_m // (32 * tiles.num_warps)
    room = {"num_warps": tiles.num_warps, "maxnreg": 48 if held <= 16 else 64 if held <= 32 else 96}
    room |= {"PRODUCE": produce, "CONSUME": _consume}
    return launch(boxes, product, shape, tiles.programs * given.chip.num_sms, **room)


@gluon.jit
def _consume(stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies the loaded stages. Weights are the left operand, which fills the tall side of the
    tensor cores. A stage is released once the next step's multiplications have begun."""
    STAGES: gl.constexpr = SHAPE.stages
    LINES: gl.constexpr = SHAPE.lines
    M: gl.constexpr = SHAPE.block_m
    N: gl.constexpr = SHAPE.mma_n
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    WIDTH: gl.constexpr = 8 if SHAPE.split_k == 1 else 4
    LANES: gl.constexpr = min(N // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    stage, phase, previous = 0, 0, 0
    for unit in range(gl.program_id(0), SHAPE.tiles * SHAPE.split_k, gl.num_programs(0)):
        result = gl.zeros([N, M], gl.float32, layout=RESULT)
        for step in range(SHAPE.steps):
            mbarrier.wait(stages.bars.index(stage), phase)
            for line in gl.static_range(LINES):
                number = stage * LINES + line
                right = stages.inputs.index(number).permute((1, 0))
                result = warpgroup_mma(stages.weights.index(number), right, result, is_async=True)
            result = warpgroup_mma_wait(LINES, [result])
            if step > 0:
                mbarrier.arrive(stages.bars.index(STAGES + previous), count=1)
            # Counted, because a division takes longer than a step of few rows multiplies.
            previous, is_last = stage, stage == STAGES - 1
            stage, phase = gl.where(is_last, 0, stage + 1), phase ^ is_last.to(gl.int32)
        result = warpgroup_mma_wait(0, [result])
        mbarrier.arrive(stages.bars.index(STAGES + previous), count=1)
        values = gl.convert_layout(result.to(product.base.dtype.element_ty), STORED)
        inside = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, STORED)), 1)
        store(product, values, unit, inside, SHAPE.block_n, 1, SHAPE)
