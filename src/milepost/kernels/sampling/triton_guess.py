"""Triton: what will probably be drawn from logits that are a guess themselves.

A draft is accepted where it is the token that the model draws at its place. So the noise of that
place is added here, too, which makes both the same more often than the likeliest token would be.
What a request's parameters do besides the temperature is left out: that changes few draws.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.sampling.rows import block_size, num_blocks
from milepost.kernels.sampling.triton import best_of_row_kernel
from milepost.kernels.sampling.triton_draw import gumbel
from milepost.kernels.sampling.triton_parts import DRAWS, INTS


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """Token ids [R] int64 of `logits` [R, V], whose draws have these `indices` [R] int32; of `ints`
    [R, 8], laid out as `StepRows.ints`, kinds and seeds count. Of a row that doesn't draw, the
    likeliest. `temperatures` [R] float32."""
    num_rows, vocab_size = logits.shape
    block, blocks = block_size(vocab_size), num_blocks(vocab_size)
    best = torch.empty(num_rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _guess_kernel[(blocks, num_rows)](
        logits,
        logits.stride(0),
        ints,
        temperatures,
        indices,
        best,
        places,
        vocab_size,
        BLOCK=block,
        num_warps=8,
    )
    best_of_row_kernel[(num_rows,)](
        best,
        places,
        token_ids,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    return token_ids


@quick
@triton.jit
def _guess_kernel(
    logits,
    stride,
    ints,
    temperatures,
    indices,
    best,
    places,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_b * BLOCK + tl.arange(0, BLOCK)
    is_v = o_v < vocab_size
    b_x = tl.load(logits + i_r * stride + o_v, is_v, float("-inf")).to(tl.float32)
    p_ints = ints + i_r * INTS
    if tl.load(p_ints) & DRAWS != 0:
        b_noise = gumbel(p_ints, tl.load(indices + i_r), i_b * (BLOCK // 4), BLOCK)
        b_x = b_x / tl.load(temperatures + i_r) + b_noise
    top, place = tl.max(b_x, 0, return_indices=True)
    o_best = i_r * tl.num_programs(0) + i_b
    tl.store(best + o_best, top)
    # Among NaN the greatest may be found where there is no token.
    tl.store(places + o_best, tl.minimum(i_b * BLOCK + place, vocab_size - 1))
