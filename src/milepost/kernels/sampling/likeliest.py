"""The likeliest token of each row, by logits alone (`argmax`) or with the noise of a draw
(`guess`); and what these launches share with those of a draw: the order of logits, the noise, and
constants of their rows.

A row's logits are ordered by the bits of their distance to the best one, scaled by the temperature:
bits of floats of one sign are in the numbers' order.

Legend: R rows, V vocabulary, B blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels import sampling
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.sampling import block_size, num_blocks

INTS = tl.constexpr(sampling.NUM_INTS)
INDEX, TOP_K = tl.constexpr(sampling.INDEX), tl.constexpr(sampling.TOP_K)
FLOOR, COUNTS = tl.constexpr(sampling.FLOOR), tl.constexpr(sampling.COUNTS)
MASK, SEED_LOW = tl.constexpr(sampling.MASK), tl.constexpr(sampling.SEED_LOW)
SEED_HIGH, PLAIN = tl.constexpr(sampling.SEED_HIGH), tl.constexpr(sampling.IS_PLAIN)
DRAWS, SEARCHES = tl.constexpr(sampling.DRAWS), tl.constexpr(sampling.SEARCHES)
NUM_BOUNDS = tl.constexpr(sampling.NUM_BOUNDS)
BEYOND = tl.constexpr(0x7F800001)
"""Greater than the distance of any logit, of minus infinity too, but not of NaN."""


class Noise(NamedTuple):
    """Settings of future draws: columns of `StepRows`, and indices of the draws [R] int32."""

    ints: Any
    temperatures: Any
    indices: Any


class BlockBests(NamedTuple):
    """The best logit of each block [R, B], and its token."""

    base: Any
    places: Any


def argmax(logits: Tensor) -> Tensor:
    """Returns each row's token with the greatest of `logits` [R, V], the first of equal ones: [R]
    int64. V is below 2^31.

    Takes two launches over blocks, since there are few rows and they are long.
    """
    return _choose(logits, None)


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """Guesses the tokens [R] int64 that draws number `indices` [R] int32 will return, from `logits`
    [R, V] of a draft. Uses kinds and seeds of `ints` [R, 8], laid out as `StepRows.ints`, and
    `temperatures` [R] float32. A row that does not draw gets its likeliest token.

    A draft is accepted if it equals the token that the model draws there. With the noise of that
    draw both agree more often than with the likeliest token. Other sampling parameters are ignored,
    since they change few draws.
    """
    return _choose(logits, Noise(ints, temperatures, indices))


def _choose(logits: Tensor, noise: Noise | None) -> Tensor:
    num_rows, vocab_size = logits.shape
    block, blocks = block_size(vocab_size), num_blocks(vocab_size)
    bests = BlockBests(
        torch.empty(num_rows, blocks, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device),
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_block_kernel[(blocks, num_rows)](
        logits, noise, bests, logits.stride(0), vocab_size, BLOCK=block, num_warps=8, **OVERLAPPED
    )
    _best_of_row_kernel[(num_rows,)](
        bests, token_ids, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1, **OVERLAPPED
    )
    return token_ids


@quick
@triton.jit
def _best_of_block_kernel(logits, noise, bests, stride, vocab_size, BLOCK: tl.constexpr):
    launch_dependents()
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_b * BLOCK + tl.arange(0, BLOCK)
    p_x = logits + i_r * stride + o_v
    wait_for_inputs()
    b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("-inf")).to(tl.float32)
    if noise is not None:
        p_ints = noise.ints + i_r * INTS
        if tl.load(p_ints) & DRAWS != 0:
            b_noise = gumbel(p_ints, tl.load(noise.indices + i_r), i_b * (BLOCK // 4), BLOCK)
            b_x = b_x / tl.load(noise.temperatures + i_r) + b_noise
    top, place = tl.max(b_x, 0, return_indices=True)
    o_best = i_r * tl.num_programs(0) + i_b
    tl.store(bests.base + o_best, top)
    # With NaN, the maximum may be found past the last token.
    tl.store(bests.places + o_best, tl.minimum(i_b * BLOCK + place, vocab_size - 1))


@quick
@triton.jit
def _best_of_row_kernel(bests, token_ids, num_blocks, BLOCKS: tl.constexpr):
    launch_dependents()
    wait_for_inputs()
    i_r, o_b = tl.program_id(0), tl.arange(0, BLOCKS)
    is_b = o_b < num_blocks
    b_tops = tl.load(bests.base + i_r * num_blocks + o_b, mask=is_b, other=float("-inf"))
    _, winner = tl.max(b_tops, 0, return_indices=True)
    winner = tl.minimum(winner, num_blocks - 1)
    place = tl.load(bests.places + i_r * num_blocks + winner)
    tl.store(token_ids + i_r, place.to(tl.int64))


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
