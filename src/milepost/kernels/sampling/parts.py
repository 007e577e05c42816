"""Parts of a draw's stages: the order of logits, the noise, and constants of their rows.

A row's logits are ordered by the bits of their distance to the best one, scaled by the temperature:
bits of floats of one sign are in the numbers' order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels import sampling

INTS = tl.constexpr(sampling.NUM_INTS)
INDEX, TOP_K = tl.constexpr(sampling.INDEX), tl.constexpr(sampling.TOP_K)
FLOOR, COUNTS = tl.constexpr(sampling.FLOOR), tl.constexpr(sampling.COUNTS)
MASK, SEED_LOW = tl.constexpr(sampling.MASK), tl.constexpr(sampling.SEED_LOW)
SEED_HIGH, PLAIN = tl.constexpr(sampling.SEED_HIGH), tl.constexpr(sampling.IS_PLAIN)
DRAWS, SEARCHES = tl.constexpr(sampling.DRAWS), tl.constexpr(sampling.SEARCHES)
NUM_BOUNDS = tl.constexpr(sampling.NUM_BOUNDS)
BEYOND = tl.constexpr(0x7F800001)
"""Greater than the distance of any logit, of minus infinity too, but not of NaN."""


class DrawSettings(NamedTuple):
    """Settings of a row's draw."""

    top: Any
    """Best logit."""
    temperature: Any
    top_k: Any
    floor: Any
    """Bits of min_p's distance."""
    share: Any
    """top_p."""


@triton.jit
def top_of(tops, i_r, num_blocks, BLOCKS: tl.constexpr):
    """Returns the best logit of a row, or 0 if all are minus infinity."""
    i_b = tl.arange(0, BLOCKS)
    values = tl.load(tops + i_r * num_blocks + i_b, mask=i_b < num_blocks, other=float("-inf"))
    top = tl.max(values, 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def distance_of(x, top, temperature):
    """Returns the bits of the distance to the best logit divided by the temperature: smaller is
    likelier."""
    return tl.abs(tl.div_rn(x - top, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def open_row(rows, scratch, i_r, row, num_blocks, BLOCKS: tl.constexpr):
    """Returns the settings of row i_r of the workspace, which is row `row` of the step."""
    top = top_of(scratch.tops, i_r, num_blocks, BLOCKS)
    temperature = tl.load(rows.floats + row * 4)
    top_k = tl.load(rows.ints + row * INTS + TOP_K)
    floor = tl.load(rows.ints + row * INTS + FLOOR)
    return DrawSettings(top, temperature, top_k, floor, tl.load(rows.top_p + row))


@triton.jit
def gumbel(ints, index, first_quad, BLOCK: tl.constexpr):
    """Returns the noise of a block of tokens [BLOCK] float32: see `reference.gumbel`."""
    low = tl.load(ints + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(ints + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    o_quad = first_quad + tl.arange(0, BLOCK // 4)
    b_zero = o_quad * 0
    w0, w1, w2, w3 = tl.philox(high << 32 | low, o_quad, b_zero + index, b_zero, b_zero)
    b_words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])
    b_uniform = ((b_words >> 9).to(tl.int32) * 2 + 1).to(tl.float32) * (1 / 16777216)
    return -_log(-_log(1 - b_uniform))


@triton.jit
def _log(x):
    """Returns the logarithm of a normal number, accurate in float32 near 1 too, unlike a GPU's
    own."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True)  # from sqrt(1/2) to sqrt(2)
    ratio = (x - 1) / (x + 1)
    square = ratio * ratio
    series = 2 / 7 + square * (2 / 9 + square * (2 / 11))
    series = 2 + square * (2 / 3 + square * (2 / 5 + square * series))
    return ratio * series + exponent.to(tl.float32) * 0.6931471805599453
