"""Builds batches and pools by hand: what the runner does, in its plainest form.

Legend: S sequences, P pages in the longest page table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from milepost.kernels.attention import rows_per_page
from milepost.layers.context import (
    AttentionSpec,
    BatchContext,
    LayerSpec,
    RecurrentState,
    StateExport,
)
from milepost.runner.pools import zeros


@dataclass(kw_only=True)
class Part:
    """One sequence's share of a step."""

    pages: list[int]
    start: int
    length: int
    slot_in: int
    slot_out: int
    write_from: int = 0
    """Position from which KV is written; what is before it is in the pages already."""
    exports: dict[int, int] = field(default_factory=dict)
    """Position -> slot."""


@dataclass
class Pools:
    """KV and states of every layer. Slots and pages but slot 0 hold NaN until they are written."""

    kv: dict[int, Tensor]
    states: dict[int, RecurrentState]
    page_size: int

    def context(self, parts: list[Part], num_decodes: int = 0) -> BatchContext:
        """The context of a step with these sequences, of which the first `num_decodes` decode."""
        return build_context(parts, self.page_size, num_decodes, kv=self.kv, states=self.states)


def build_pools(
    specs: tuple[LayerSpec, ...],
    dtype: torch.dtype,
    *,
    num_pages: int = 16,
    page_size: int = 64,
    num_slots: int = 8,
    state_dtype: torch.dtype | None = None,
) -> Pools:
    """Pools for a model's layers; `state_dtype` is float32, or float64 for a float64 model."""
    if state_dtype is None:
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    kv, states = {}, {}
    for index, spec in enumerate(specs):
        if isinstance(spec, AttentionSpec):
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            kv[index] = build_pages(*shape, dtype)
        else:
            states[index] = RecurrentState(
                conv=_slots(num_slots, spec.conv_shape, dtype),
                recurrent=_slots(num_slots, spec.recurrent_shape, state_dtype),
            )
    return Pools(kv, states, page_size)


def build_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Tensor:
    """A pool [pages, 2, page_size, num_kv_heads, head_dim] of NaN, with NaN between the pages: a
    row more than another layer has."""
    num_rows = 4 * page_size + 1
    rows = torch.full(
        (num_pages, num_rows, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device
    )
    return rows[:, -2 * page_size :].unflatten(1, (2, page_size))


def build_context(
    parts: list[Part],
    page_size: int,
    num_decodes: int = 0,
    *,
    kv: dict[int, Tensor] | None = None,
    states: dict[int, RecurrentState] | None = None,
) -> BatchContext:
    """The context of a step with these sequences, of which the first `num_decodes` decode."""
    starts, lengths = [part.start for part in parts], [part.length for part in parts]
    positions = torch.cat([torch.arange(p.start, p.start + p.length) for p in parts])
    owners = torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths))
    num_pages = max(len(part.pages) for part in parts)
    page_table = torch.zeros(len(parts), num_pages, dtype=torch.int64)
    for row, part in zip(page_table, parts, strict=True):
        row[: len(part.pages)] = torch.tensor(part.pages)
    page_rows = rows_per_page(next(iter(kv.values()))) if kv else 0
    kv_rows = page_table[owners, positions // page_size] * page_rows + positions % page_size
    write_from = torch.tensor([part.write_from for part in parts])
    written = (positions >= write_from[owners]).nonzero()[:, 0]
    return BatchContext(
        num_decodes=num_decodes,
        starts=tuple(starts),
        lengths=tuple(lengths),
        positions=positions,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        page_table=page_table,
        kv_lengths=torch.tensor(starts) + torch.tensor(lengths),
        kv_write_tokens=written,
        kv_write_rows=kv_rows[written],
        slot_in=torch.tensor([part.slot_in for part in parts]),
        slot_out=torch.tensor([part.slot_out for part in parts]),
        exports=tuple(
            StateExport(sequence=sequence, position=position, slot=slot)
            for sequence, part in enumerate(parts)
            for position, slot in part.exports.items()
        ),
        kv=kv or {},
        states=states or {},
    )


def spread(pool: Tensor) -> Tensor:
    """A copy whose pages, or slots, are so far apart that 32 bits do not count the elements of all.
    Between them no memory is touched."""
    row = pool.stride(-2) * pool.shape[-2]
    step = (2**31 // (len(pool) - 1) // row + 1) * row
    memory = zeros(len(pool) * step * pool.itemsize, torch.device("cpu")).view(pool.dtype)
    return memory.as_strided(pool.shape, (step, *pool.stride()[1:])).copy_(pool)


def _slots(num_slots: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    slots = torch.full((num_slots, *shape), torch.nan, dtype=dtype)
    slots[0] = 0
    return slots
