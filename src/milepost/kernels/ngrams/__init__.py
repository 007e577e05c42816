"""N-gram embeddings: rows of a table in host memory, chosen by hashes of a token and those before
it (Engram, arXiv 2601.07372; as Qwen3.8-Flash-Next has them). This is the definition, in plain
torch; on a GPU `rows.triton` reads the table, over the bus.

A sequence's state is what its next tokens need of those before: the last D inputs of a convolution,
and the last ids. It is carried beside the slots' states, as numbers of the model's dtype; ids are
written as digits, which bfloat16 holds exactly.

Legend: T tokens, F sequences that have tokens, D tokens of a state, N numbers of each, W states
that are kept, O order of the largest n-gram, X rows that a token has of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from milepost.kernels.layout.batch import Batch
from milepost.kernels.mtp import Carried, CarryRows, lay_out
from milepost.kernels.platform.device import Chip
from milepost.kernels.rows import take_from_host

__all__ = [
    "NUM_DIGITS",
    "NgramOperation",
    "NgramSequences",
    "continued",
    "decode_ids",
    "encode_ids",
    "hash_ids",
    "keep",
    "take_from_host",
]

_BASE = 256
NUM_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOperation:
    """Says which of a step's tokens begin a sequence, and which states are kept."""

    def lay_out(self, batch: Batch) -> CarryRows:
        """Lays out a step as for a head, which carries a state beside those of slots likewise."""
        return lay_out(batch)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """No kernel takes states in and keeps them yet."""
        return "n-gram embeddings have no fused kernel yet"


@dataclass(frozen=True, slots=True)
class NgramSequences:
    """How a step's tokens fall to sequences, and what each of these begins with."""

    begins: Tensor
    """[F], their first tokens."""
    owners: Tensor
    """[T], each token's sequence."""
    states: Tensor
    """[F, size], carried from the tokens before."""

    @classmethod
    def of(cls, rows: CarryRows, carried: Carried, columns: slice) -> NgramSequences:
        """Reads these columns of what slots, or records of accepted drafts, carry."""
        where, place = rows.sources.long().unbind(1)
        begins = (where >= 0).nonzero()[:, 0]
        where, place = where[begins], place[begins]
        states = carried.states[where.clamp(max=len(carried.states) - 1), columns]
        if carried.records is not None:
            in_record = place >= 0
            states[in_record] = carried.records[where[in_record], place[in_record], columns]
        return cls(begins, (rows.sources[:, 0] >= 0).long().cumsum(0) - 1, states)


def continued(
    sequences: NgramSequences, values: Tensor, before: Tensor, tokens: Tensor, back: int
) -> Tensor:
    """Returns [n, N]: of `values` [T, N] those `back` tokens before each of `tokens` [n], or from
    the state `before` [F, D, N] where that lies before the step."""
    owners = sequences.owners[tokens]
    index = tokens - sequences.begins[owners]
    found = values[(tokens - back).clamp(min=0)]
    is_before = index < back
    places = before.shape[1] + index[is_before] - back
    found[is_before] = before[owners[is_before], places]
    return found


def keep(
    states: Tensor, recorded: Tensor, carried: Carried, rows: CarryRows, columns: slice
) -> None:
    """Carries on the `states` [W, size] after the tokens that `rows.targets` name, and those of
    records; records the ones after drafts, `recorded`."""
    token, slot, row, place = rows.targets.long().unbind(1)
    carried.states[slot[token >= 0], columns] = states
    if carried.records is None:
        return
    is_folded = (token < 0) & (slot >= 0)
    found = carried.records[row[is_folded], place[is_folded], columns]
    carried.states[slot[is_folded], columns] = found
    row, place = rows.recorded.long().unbind(1)
    carried.records[row[row >= 0], place[row >= 0], columns] = recorded


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
    ids: list[Tensor], stop: int, multipliers: list[int], sizes: list[list[int]]
) -> Tensor:
    """Returns [T, X], the rows that tokens have of a table. `ids` are O tensors [T]: the tokens',
    those before them, and so on; from the `stop` on that is found first, going back, all are that.

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
