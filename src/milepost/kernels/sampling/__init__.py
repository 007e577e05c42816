"""Sampling: greedy choices (`argmax`), guesses of draws (`guess`), and draws on a GPU (`draws`).
`runner.sampling` and `runner.sampler` say what is drawn, `reference` defines the noise. The
structures here are the inputs of a draw and the memory between its launches.

torch's argmax is the definition of `argmax`; on a GPU it takes several times as long.

Legend: R rows, V vocabulary, B blocks, E entries (biases), W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels.platform.tables import fused

__all__ = ["StepRows", "Workspace", "argmax", "guess"]

BLOCK = 8192
LISTED = 16384
"""Most logits that `search` collects; if there are more, it reads the whole row, which is
slower."""
NUM_BOUNDS = 16

# Columns of `StepRows.ints`.
KIND, INDEX, TOP_K, FLOOR, COUNTS, MASK, SEED_LOW, SEED_HIGH = range(8)
NUM_INTS = 8
# Bits of a kind.
IS_PLAIN, DRAWS, SEARCHES = 1, 2, 4


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
