"""Arguments of the attention kernels, in named groups.

Kernels take these tuples as they are, and read fields by name. `base` is a tensor on the host and a
pointer on the device.

Legend: T tokens, H query heads, G KV heads, E head_dim, N items, P partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import PagedKV, rows_per_page

_LOG2_E = 1.4426950408889634


class QueryHeads(NamedTuple):
    """Queries [T, H, E], or the entries [T, H, P] of queries that latents share; or None."""

    base: Any
    stride: Any
    """Elements from one token to the next."""
    head_stride: Any


class OutputGate(NamedTuple):
    """Gates [T, H * E] or [T, H] whose sigmoid multiplies the output, or None."""

    base: Any
    stride: Any
    each: Any
    """Entries of the output per gate; None if it is one. (A 1 would be a constant, and Triton 3.6
    takes constants inside tuples for None after a `return`.)"""

    @staticmethod
    def of(gate: Tensor | None, width: int) -> OutputGate:
        """Returns the gates of outputs of `width` entries."""
        if gate is None:
            return OutputGate(None, 0, None)
        each = width // gate.shape[1]
        return OutputGate(gate, gate.stride(0), each if each > 1 else None)


class WorkItems(NamedTuple):
    """Items [N, ITEM_SIZE], and the first partial result of each token [T + 1]."""

    base: Any
    bases: Any


class PartialResults(NamedTuple):
    """Partial results [P, H, E] float32 and their LSE [P, H]."""

    base: Any
    lse: Any


class WorkItem(NamedTuple):
    """An item of work on the device (see `tiles`)."""

    first: Any
    num_tokens: Any
    """0: padding."""
    table_row: Any
    position: Any
    begin: Any
    end: Any
    ordinal: Any


class AttentionArguments(NamedTuple):
    """Everything that a kernel reads and writes, except the pages."""

    query: Any
    shared_query: Any
    gate: Any
    output: Any
    """Results [T, H * E]."""
    kv_scales: Any
    tables: Any
    work: Any
    partials: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Inputs and outputs that all launches of one attention share."""

    query: Tensor
    """[T, H, E]"""
    gate: Tensor | None
    """[T, H * E], or one for each head: [T, H]."""
    kv: PagedKV
    scale: float
    bases: Tensor
    partials: PartialResults
    output: Tensor
    """[T, H * E]"""
    window: int = 0
    """Number of tokens that a token attends to; 0 for all."""
    shared_query: Tensor | None = None
    """[T, H, P] for latents."""

    def arguments(self, work: Tensor) -> AttentionArguments:
        """Returns the arguments of a launch for these items."""
        return AttentionArguments(
            query=_heads(self.query),
            shared_query=_heads(self.shared_query),
            gate=self.output_gate,
            output=self.output,
            kv_scales=self.kv.scales,
            tables=self.kv.tables,
            work=WorkItems(work, self.bases),
            partials=self.partials,
        )

    @property
    def output_gate(self) -> OutputGate:
        return OutputGate.of(self.gate, self.output.shape[1])

    @property
    def extents(self) -> tuple[int, int]:
        """Rows of KV from one page to the next, and entries from one page table to the next. They
        depend on the size of memory, and kernels must not be specialised by them, so they are not
        fields of a structure."""
        assert self.kv.tables is not None, "items name rows of page tables"
        return rows_per_page(self.kv.pool), self.kv.tables.stride(0)

    @property
    def scale_of_2(self) -> float:
        """The scale of scores for exponentials of base 2."""
        return self.scale * _LOG2_E


def _heads(query: Tensor | None) -> QueryHeads:
    return QueryHeads(None, 0, 0) if query is None else QueryHeads(query, *query.stride()[:2])


def make_partials(query: Tensor, items: AttentionItems) -> PartialResults:
    """Allocates partial results for the items of queries [T, H, E]."""
    _, num_heads, size = query.shape
    base = query.new_empty(items.room.num_partials, num_heads, size, dtype=torch.float32)
    return PartialResults(base, base.new_empty(items.room.num_partials, num_heads))
