"""What the stages of a draw share: how logits are ordered, and constants of their rows.

A row's logits are ordered by the bits of their distance to its best one, scaled by the temperature:
of floats of one sign the bits are ordered as the numbers are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.sampling import rows

INTS = tl.constexpr(rows.NUM_INTS)
INDEX, TOP_K, FLOOR = tl.constexpr(rows.INDEX), tl.constexpr(rows.TOP_K), tl.constexpr(rows.FLOOR)
COUNTS, MASK = tl.constexpr(rows.COUNTS), tl.constexpr(rows.MASK)
SEED_LOW, SEED_HIGH = tl.constexpr(rows.SEED_LOW), tl.constexpr(rows.SEED_HIGH)
PLAIN, DRAWS = tl.constexpr(rows.IS_PLAIN), tl.constexpr(rows.DRAWS)
SEARCHES = tl.constexpr(rows.SEARCHES)
NUM_BOUNDS = tl.constexpr(rows.NUM_BOUNDS)
BEYOND = tl.constexpr(0x7F800001)
"""Past every logit, minus infinity too; but not past NaN."""


@triton.jit
def top_of(tops, i_r, num_blocks, BLOCKS: tl.constexpr):
    """The best logit of a row; 0 where none is possible."""
    i_b = tl.arange(0, BLOCKS)
    values = tl.load(tops + i_r * num_blocks + i_b, mask=i_b < num_blocks, other=float("-inf"))
    top = tl.max(values, 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def distance_of(x, top, temperature):
    """Bits of the scaled distance to the best logit: the fewer, the likelier."""
    return tl.abs(tl.div_rn(x - top, temperature)).to(tl.int32, bitcast=True)
