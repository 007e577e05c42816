"""The definition of a draw: which tokens remain, and the noise that chooses among them.

The noise of a token is a function of (seed, index of the draw, token id) alone: Philox4x32-10
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011) keyed by the seed. The same draw
on any device returns the same noise.

Masses are integers, in units of 2^-40 of the likeliest token's: their sums do not depend on the
order in which they are added up.

Legend: R rows, V vocabulary, C candidates (the likeliest tokens, sorted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASS_OF_BEST = 2.0**40
"""Mass of the likeliest token. Sums of up to 2**22 tokens, more than any vocabulary has, fit 63
bits."""

_CANDIDATES = 1024
"""Tokens that top_p looks at first. The whole vocabulary is sorted only if they do not suffice."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


# --- the noise ------------------------------------------------------------------------------------


def gumbel(
    seeds: Sequence[int], indices: Sequence[int], num_tokens: int, device: torch.device
) -> Tensor:
    """Returns finite noise [R, num_tokens] float32 for seeds below 2^64 and indices below 2^32."""
    quads = torch.arange(-(-num_tokens // 4), device=device).unsqueeze(0)
    seed_low = _column([seed & _WORD for seed in seeds], device)
    seed_high = _column([seed >> 32 for seed in seeds], device)
    zeros = torch.zeros_like(quads)
    counter = (quads, _column(indices, device), zeros, zeros)
    words = torch.stack(philox(counter, (seed_low, seed_high)), dim=-1).flatten(1)[:, :num_tokens]
    # Odd multiples of 2^-24, exact in float32: neither 0 nor 1 is among them.
    uniform = ((words >> 9) * 2 + 1).float() * 2.0**-24
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns four random words for a counter of four words and a key of two; all are int64 with 32
    bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    words: tuple[Tensor, ...] = torch.broadcast_tensors(c0, c1, c2, c3)
    return words


def _product(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Returns the upper and the lower 32 bits."""
    product = words * multiplier  # wraps around past 63 bits, which leaves all 64 bits right
    return (product >> 32) & _WORD, product & _WORD


def _column(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device).unsqueeze(1)


# --- what remains ---------------------------------------------------------------------------------


def lowest_kept(scaled: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns the lowest logit [R, 1] that min_p, top_k and top_p keep.

    `scaled` [R, V] has maximum 0; `floor` [R, 1] is min_p's own; `top_k` [R, 1] int64, V for all
    tokens; `top_p` [R, 1] float64 is a share of what the other two leave. Equal logits stay or go
    together, so the order in which a sort leaves them does not matter.
    """
    vocab_size = scaled.shape[1]
    is_unlimited = top_k == vocab_size
    if bool((is_unlimited & (top_p == 1)).all()):
        return floor
    largest_k = int(torch.where(is_unlimited, 1, top_k).max())
    narrow = min(vocab_size, max(_CANDIDATES, largest_k))
    nucleus = _nucleus(scaled, floor, top_k, top_p, narrow)
    if narrow < vocab_size and not nucleus.is_final.all():
        nucleus = _nucleus(scaled, floor, top_k, top_p, vocab_size)
    return nucleus.lowest


@dataclass(frozen=True, slots=True)
class _Nucleus:
    """The tokens to keep, judged by some of the likeliest; fields are [R, 1]."""

    lowest: Tensor
    """The lowest logit kept."""
    is_final: Tensor
    """Whether those tokens suffice to decide."""


def _nucleus(
    scaled: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> _Nucleus:
    """Judges by the `num_candidates` likeliest tokens, which must include every top_k below V."""
    values = scaled.topk(num_candidates, dim=-1).values
    ranks = torch.arange(num_candidates, device=scaled.device)
    is_left = (ranks < top_k) & (values >= floor)
    up_to = torch.where(is_left, _mass(values), 0).cumsum(dim=-1)
    above = up_to - torch.where(is_left, _mass(values), 0)
    is_unlimited = top_k == scaled.shape[1]
    everything = torch.where(scaled >= floor, _mass(scaled), 0).sum(-1, True)
    total = torch.where(is_unlimited, everything, up_to[:, -1:])
    wanted = (top_p * total.double()).ceil().to(torch.int64)
    is_kept = is_left & ((above < wanted) | (top_p == 1))
    num_kept = is_kept.sum(dim=-1, keepdim=True)
    lowest = values.gather(1, (num_kept - 1).clamp(min=0))  # a row of NaN keeps none
    is_free = is_unlimited & (top_p == 1)
    is_final = is_free | ~is_unlimited | (num_kept < num_candidates)
    return _Nucleus(torch.where(is_free, floor, lowest), is_final)


def _mass(scaled: Tensor) -> Tensor:
    return (scaled.exp() * MASS_OF_BEST).to(torch.int64)
