"""Triton: the lowest logit of a nucleus, by bisection over the bits of a float.

The mass above a logit grows as the logit falls, and floats of one sign are ordered as their bits
are: 31 halvings find the lowest logit whose mass above is still less than is wanted.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


def nucleus_floor(
    scaled: Tensor, floor: Tensor, wanted: Tensor, known: Tensor, is_known: Tensor
) -> Tensor:
    """The least value [R, 1] float32 of which the mass of all greater ones is below `wanted`.

    `scaled` [R, V] float32 are logarithms of masses, none above 0; those below `floor` [R, 1] count
    for nothing. `wanted` [R, 1] float64 is less than a row's whole mass. Rows that `is_known` [R,
    1] bool marks are not looked at: theirs is `known` [R, 1].
    """
    num_rows, vocab_size = scaled.shape
    found = torch.empty_like(known)
    _search_kernel[(num_rows,)](
        scaled,
        floor,
        wanted,
        known,
        is_known,
        found,
        scaled.stride(0),
        vocab_size,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )
    return found


@triton.jit
def _search_kernel(
    scaled, floor, wanted, known, is_known, found, stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(floor + row)
    result = tl.load(known + row)
    if tl.load(is_known + row) == 0:
        limit = tl.load(wanted + row)
        # Of what lies below 0, the bits without the sign: mass(low) < limit <= mass(high).
        low, high = 0, 0x7F800000
        for _ in range(31):
            middle = low + (high - low) // 2
            mass = _mass_above(scaled + row * stride, middle, least, vocab_size, BLOCK)
            is_less = mass < limit
            low = tl.where(is_less, middle, low)
            high = tl.where(is_less, high, middle)
        result = tl.maximum(-low.to(tl.float32, bitcast=True), least)
    tl.store(found + row, result)


@triton.jit
def _mass_above(logits, bits, least, vocab_size, BLOCK: tl.constexpr):
    """What the logits weigh whose bits are fewer, that is, which are greater."""
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        is_above = (tl.abs(x).to(tl.int32, bitcast=True) < bits) & (x >= least)
        mass += tl.where(is_above, tl.exp(x), 0.0).to(tl.float64)
    return tl.sum(mass, 0)
