"""Where the KV of a batch's sequences lies in the pages; the same for every attention layer of a
step.

A KV slot is page * page_size + offset. What lies in a slot that no token was written to is unknown,
so reads never touch one: places past the end of a sequence name its first token's slot, and are
masked.

Legend: D decoding sequences, P pages in the longest page table, L tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePages:
    """KV of D sequences, padded to the longest."""

    kv_slots: Tensor
    """[D * L] int64."""
    mask: Tensor
    """[D, 1, 1, L] bool, true where a token is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPages:
    """KV of one sequence, and where its new tokens stand in the batch."""

    kv_slots: Tensor
    """[start + length] int64."""
    first: int
    """Index among the prefill tokens of the sequence's first new token."""
    start: int
    """Position of that token."""
    length: int
    """New tokens."""


def lay_out_decodes(
    page_table: Tensor, kv_lengths: Tensor, longest: int, page_size: int
) -> DecodePages:
    """Lay out D sequences: `page_table` [D, P], `kv_lengths` [D], of which `longest` is the
    greatest."""
    places = torch.arange(longest, device=page_table.device)
    mask = places < kv_lengths[:, None]
    pages = page_table.index_select(1, places // page_size)
    kv_slots = pages * page_size + places % page_size
    kv_slots = torch.where(mask, kv_slots, page_table[:, :1] * page_size)
    return DecodePages(kv_slots=kv_slots.flatten(), mask=mask[:, None, None])


def lay_out_prefills(
    page_table: Tensor, starts: Sequence[int], lengths: Sequence[int], page_size: int
) -> tuple[PrefillPages, ...]:
    """Lay out sequences of `lengths` new tokens after `starts` earlier ones: `page_table`
    [sequences, P]."""
    laid_out, first = [], 0
    for pages, start, length in zip(page_table, starts, lengths, strict=True):
        places = torch.arange(start + length, device=page_table.device)
        kv_slots = pages.index_select(0, places // page_size) * page_size + places % page_size
        laid_out.append(PrefillPages(kv_slots=kv_slots, first=first, start=start, length=length))
        first += length
    return tuple(laid_out)
