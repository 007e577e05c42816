"""Triton: the likeliest token of each row.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_BLOCK = 8192


def argmax(logits: Tensor) -> Tensor:
    """The first of the greatest of each row of `logits` [R, V]: [R] int64; V is below 2^31.

    In two launches that go through blocks side by side: a few rows are long.
    """
    num_rows, vocab_size = logits.shape
    block = min(_BLOCK, next_power_of_2(vocab_size))
    num_blocks = cdiv(vocab_size, block)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_block_kernel[(num_blocks, num_rows)](
        logits,
        best,
        places,
        logits.stride(0),
        vocab_size,
        BLOCK=block,
        num_warps=8,
        **OVERLAPPED,
    )
    best_of_row_kernel[(num_rows,)](
        best,
        places,
        token_ids,
        num_blocks,
        BLOCKS=next_power_of_2(num_blocks),
        num_warps=1,
        **OVERLAPPED,
    )
    return token_ids


@quick
@triton.jit
def _best_of_block_kernel(logits, best, places, stride, vocab_size, BLOCK: tl.constexpr):
    launch_dependents()
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_b * BLOCK + tl.arange(0, BLOCK)
    p_x = logits + i_r * stride + o_v
    wait_for_inputs()
    b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("-inf")).to(tl.float32)
    top, place = tl.max(b_x, 0, return_indices=True)
    o_best = i_r * tl.num_programs(0) + i_b
    tl.store(best + o_best, top)
    # Among NaN the greatest may be found where there is no token.
    tl.store(places + o_best, tl.minimum(i_b * BLOCK + place, vocab_size - 1))


@quick
@triton.jit
def best_of_row_kernel(best, places, token_ids, num_blocks, BLOCKS: tl.constexpr):
    launch_dependents()
    wait_for_inputs()
    i_r, o_b = tl.program_id(0), tl.arange(0, BLOCKS)
    is_b = o_b < num_blocks
    b_tops = tl.load(best + i_r * num_blocks + o_b, mask=is_b, other=float("-inf"))
    _, winner = tl.max(b_tops, 0, return_indices=True)
    winner = tl.minimum(winner, num_blocks - 1)
    tl.store(token_ids + i_r, tl.load(places + i_r * num_blocks + winner).to(tl.int64))
