"""The likeliest token of each row, by logits alone (`argmax`) or with the noise of a draw
(`guess`).

Legend: R rows, V vocabulary, B blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.sampling import block_size, num_blocks
from milepost.kernels.sampling.parts import DRAWS, INTS, gumbel


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
    # Among NaN the greatest may be found where there is no token.
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
