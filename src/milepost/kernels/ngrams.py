"""N-gram embeddings: rows of a table in host memory, chosen by hashes of a token and those before
it (Engram, arXiv 2601.07372; as Qwen3.8-Flash-Next has them). This is the definition, in plain
torch and in shapes that graphs can have; on a GPU `mtp.triton` keeps states, and `rows.triton`
reads the table, over the bus.

A sequence's state is what its next tokens need of those before: the last D inputs of a convolution,
and the last ids. It is carried beside the slots' states, as numbers of the model's dtype; ids are
written as digits, which bfloat16 holds exactly.

Legend: T tokens, N numbers of each, O order of the largest n-gram, X rows that a token has of the
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from milepost.kernels.mtp import Carried, CarryOperation, CarryRows, keep_states
from milepost.kernels.rows import take_from_host

__all__ = [
    "NUM_DIGITS",
    "NgramOperation",
    "NgramSequences",
    "StatePart",
    "continued",
    "decode_ids",
    "encode_ids",
    "hash_ids",
    "keep_states",
    "last_of",
    "take_from_host",
]

_BASE = 256
NUM_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOperation(CarryOperation):
    """Says which of a step's tokens begin a sequence, and which states are kept. Slots carry these
    states as they carry an MTP head's."""


@dataclass(frozen=True, slots=True)
class NgramSequences:
    """The sequences of a step's tokens, and the state that each begins with. Shapes do not depend
    on contents, so a graph can capture it."""

    begins: Tensor
    """[T], the first token of each one's sequence."""
    where: Tensor
    """[T], the slot that carries its state, or the row of the record of it."""
    place: Tensor
    """[T], the draft whose record it is, -1 for a slot."""
    states: Tensor
    """[slots, size], what slots carry."""
    records: Tensor | None
    """[rows, drafts, size]"""

    @classmethod
    def of(cls, rows: CarryRows, carried: Carried, columns: slice) -> NgramSequences:
        """Reads these columns of the slots' states and of the records of accepted drafts."""
        sources = rows.sources.long()
        index = torch.arange(len(sources), device=sources.device)
        begins = torch.where(sources[:, 0] >= 0, index, 0).cummax(0).values
        where, place = sources[begins].unbind(1)
        records = None if carried.records is None else carried.records[..., columns]
        return cls(begins, where, place, carried.states[:, columns], records)

    def read(self, part: StatePart, tokens: Tensor, places: Tensor) -> Tensor:
        """Returns [n, N]: the states before the sequences of `tokens` [n], at `places`."""
        where, own = (
            self.where[tokens],
            slice(part.first, part.first + part.num_tokens * part.width),
        )
        states = self.states[:, own].unflatten(1, (part.num_tokens, part.width))
        found: Tensor = states[where.clamp(0, len(states) - 1), places]
        if self.records is None:
            return found
        records = self.records[..., own].unflatten(2, (part.num_tokens, part.width))
        place = self.place[tokens]
        recorded = records[where.clamp(0, len(records) - 1), place.clamp(min=0), places]
        return torch.where((place >= 0)[:, None], recorded, found)


class StatePart(NamedTuple):
    """Numbers of a state: `num_tokens` tokens, oldest first, with `width` numbers each."""

    first: int
    num_tokens: int
    width: int


def continued(
    sequences: NgramSequences, values: Tensor, part: StatePart, tokens: Tensor, back: Tensor | int
) -> Tensor:
    """Returns [n, N]: rows of `values` [T, N], those `back` tokens before each of `tokens` [n];
    from the state if that is before the step. `back` may be [n]."""
    index = tokens - sequences.begins[tokens]
    places = (part.num_tokens + index - back).clamp(0, part.num_tokens - 1)
    before = sequences.read(part, tokens, places)
    found = values[(tokens - back).clamp(min=0)]
    return torch.where((index < back)[:, None], before, found)


def last_of(
    sequences: NgramSequences, values: Tensor, part: StatePart, tokens: Tensor, count: int
) -> Tensor:
    """Returns [n, count, N]: the last `count` rows of `values` [T, N] up to each of `tokens` [n],
    oldest first; those before the step come from the state."""
    back = torch.arange(count - 1, -1, -1, device=tokens.device).repeat(len(tokens))
    found = continued(sequences, values, part, tokens.repeat_interleave(count), back)
    last: Tensor = found.unflatten(0, (len(tokens), count))
    return last


def encode_ids(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ids [...] as digits [..., 4] of `dtype`. Zeros stand for no token."""
    powers = _BASE ** torch.arange(NUM_DIGITS, device=ids.device)
    return ((ids[..., None] + 1) // powers % _BASE).to(dtype)


def decode_ids(digits: Tensor, missing: int) -> Tensor:
    """Returns the ids [...] of digits [..., 4], or `missing` where there was no token."""
    powers = _BASE ** torch.arange(NUM_DIGITS, device=digits.device)
    ids = (digits.long() * powers).sum(-1) - 1
    return torch.where(ids < 0, missing, ids)


def hash_ids(
    ids: Sequence[Tensor], stop: int, multipliers: list[int], sizes: list[list[int]]
) -> Tensor:
    """Returns [T, X]: the table rows of each token's n-grams. `ids` are O tensors [T]: of the
    tokens, of those before them, and so on. Going back, all ids from the first `stop` on count as
    `stop`.

    For n-grams of each order from 2 on `sizes` lists primes; the table has as many rows for each,
    one after the other. An n-gram's hash is the exclusive or of its ids times their `multipliers`.
    """
    shifted, is_over = [ids[0]], torch.zeros_like(ids[0], dtype=torch.bool)
    for each in ids[1:]:
        is_over |= each == stop
        shifted.append(torch.where(is_over, stop, each))
    products = [each * factor for each, factor in zip(shifted, multipliers, strict=True)]
    found, first = [], 0
    for order, own in enumerate(sizes, start=2):
        mixed = reduce(torch.bitwise_xor, products[:order])
        for size in own:
            found.append(mixed % size + first)
            first += size
    return torch.stack(found, 1)
