"""Sampling: greedy choices (`argmax`), guesses of draws (`guess`), and draws on a GPU (`draws`).
`runner.sampling` and `runner.sampler` say what is drawn. Here are the inputs of a draw, the memory
between its launches, and the definition in plain torch: which tokens remain, and the noise that
chooses among them.

torch's argmax is the definition of `argmax`; on a GPU it takes several times as long.

The noise of a token is a function of (seed, index of the draw, token id) alone: Philox4x32-10
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011) keyed by the seed. The same draw
on any device returns the same noise.

Masses are integers, in units of 2^-40 of the likeliest token's: their sums do not depend on the
order in which they are added up.

Legend: R rows, V vocabulary, B blocks, E entries (biases), W words of a mask, C candidates (the
likeliest tokens, sorted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels.platform.tables import fused

__all__ = ["StepRows", "Workspace", "argmax", "guess"]

BLOCK = 8192
LISTED = 16384
"""Largest number of logits that `search` collects; if there are more, it reads the whole row, which
is slower."""
NUM_BOUNDS = 16

# Columns of `StepRows.ints`.
KIND, INDEX, TOP_K, FLOOR, COUNTS, MASK, SEED_LOW, SEED_HIGH = range(8)
NUM_INTS = 8
# Bits of a kind.
IS_PLAIN, DRAWS, SEARCHES = 1, 2, 4
MASS_OF_BEST = 2.0**40
"""Mass of the likeliest token. Sums of up to 2**22 tokens, more than any vocabulary has, fit 63
bits."""
_CANDIDATES = 1024
"""Tokens that top_p looks at first. The whole vocabulary is sorted only if they do not suffice."""
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


class RowSettings(NamedTuple):
    """Arrays of `StepRows` that most launches read."""

    ints: Any
    floats: Any
    top_p: Any


class Scratch(NamedTuple):
    """The tensors of a `Workspace`."""

    adjusted: Any
    """[R, V] logits with biases, penalties and masks."""
    tops: Any
    """[R, B] best of each block."""
    sums: Any
    """[2, R, NUM_BOUNDS] int64, weights above each bound of the two narrowings."""
    listed: Any
    """[R, LISTED] logits that were collected."""
    found: Any
    """[R, 4] int32: number of logits collected, least and greatest of their distances that lie in
    the interval, and distance of the lowest logit kept."""
    best: Any
    """[R, B] best of each block, noise included, and its token."""
    columns: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """All inputs of a step's sampling except logits: numpy arrays on the host, then tensors."""

    ints: Any
    """[R, 8] int32: kind, index of the draw, top_k (0: all), bits of min_p's distance, row of
    counts and row of masks (-1: none), the seed's two words."""
    floats: Any
    """[R, 4] float32: temperature, repetition, frequency and presence penalty."""
    top_p: Any
    """[R] float64."""
    starts: Any
    """[R, B + 1] int32, first entry of each block of the vocabulary; entries are ordered by token
    id."""
    entry_ids: Any
    """[E] int32."""
    entry_values: Any
    """[E] float32, added to logits."""
    masks: Any
    """[masks, W] int32."""

    @property
    def settings(self) -> RowSettings:
        return RowSettings(self.ints, self.floats, self.top_p)


def num_blocks(vocab_size: int) -> int:
    """Returns the number of blocks of a row."""
    return -(-vocab_size // block_size(vocab_size))


def block_size(vocab_size: int) -> int:
    """Returns the number of tokens of a block."""
    return min(BLOCK, max(1 << (vocab_size - 1).bit_length(), 16))


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the lower and the upper 32 bits."""
    return seed & 0xFFFFFFFF, seed >> 32


class Workspace:
    """Memory for intermediate results of up to `num_rows` rows, between the launches of a draw."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        blocks = num_blocks(vocab_size)
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.num_blocks, self.block = blocks, block_size(vocab_size)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.scratch = Scratch(
            adjusted=empty(num_rows, vocab_size),
            tops=empty(num_rows, blocks),
            sums=empty(2, num_rows, NUM_BOUNDS, dtype=torch.int64),
            listed=empty(num_rows, LISTED),
            found=empty(num_rows, 4, dtype=torch.int32),
            best=empty(num_rows, blocks),
            columns=empty(num_rows, blocks, dtype=torch.int32),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self.scratch)


@fused("sampling.likeliest")
def argmax(logits: Tensor) -> Tensor:
    """Returns each row's token with the greatest of `logits` [R, V], the first of equal ones: [R]
    int64."""
    return logits.argmax(dim=-1)


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """Guesses on a GPU what will be drawn from `logits` [R, V]: see `likeliest.guess`."""
    from milepost.kernels.sampling import likeliest

    return likeliest.guess(logits, ints, temperatures, indices)


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
