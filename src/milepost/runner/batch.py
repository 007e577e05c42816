"""Builds the tensors of a step's batch from its plan, for the reference kernels.

Legend: T tokens in the batch, S sequences, P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from milepost.layers.context import BatchContext, StateExport
from milepost.runner.pools import Pools
from milepost.scheduler.plans import SequencePlan, StepPlan


class PageTables:
    """The page tables of running sequences as one tensor, a row per slot.

    Tables are append-only, so a step writes only the pages that have come since the last one.
    """

    __slots__ = ("_known", "_rows")

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self._rows = torch.zeros(num_slots + 1, max_pages, dtype=torch.int64, device=device)
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    def rows(self, sequences: Sequence[SequencePlan], slot_out: Tensor, num_pages: int) -> Tensor:
        """[S, P] page ids; entries past a sequence's own table are stale and never read."""
        for sequence in sequences:
            self._update(sequence)
        return self._rows[slot_out, :num_pages]

    def _update(self, sequence: SequencePlan) -> None:
        table, slot = sequence.page_table, sequence.slot_out
        known_table, num_known = self._known.get(slot, (None, 0))
        if known_table is not table:
            num_known = 0
        if num_known < len(table):
            pages = torch.tensor(table[num_known:], dtype=torch.int64)
            self._rows[slot, num_known : len(table)] = pages.to(self._rows.device)
            self._known[slot] = (table, len(table))


def build(plan: StepPlan, pools: Pools, tables: PageTables) -> tuple[Tensor, BatchContext]:
    """Token ids [T] int64 and the context of a step. Sequences stand as in the plan."""
    sequences = plan.sequences
    device = pools.device
    starts = tuple(s.start for s in sequences)
    lengths = tuple(len(s.tokens) for s in sequences)
    ends = [s.end for s in sequences]
    positions = torch.from_numpy(_concat([np.arange(s.start, s.end) for s in sequences]))
    positions = positions.to(device)
    slot_out = torch.tensor([s.slot_out for s in sequences], device=device)
    num_pages = max(-(-end // pools.page_size) for end in ends)
    page_table = tables.rows(sequences, slot_out, num_pages)
    written, kv_rows = _written(sequences, page_table, positions, pools)
    context = BatchContext(
        num_decodes=plan.num_decodes,
        starts=starts,
        lengths=lengths,
        positions=positions,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        page_table=page_table,
        kv_lengths=torch.tensor(ends, device=device),
        kv_write_tokens=written,
        kv_write_rows=kv_rows,
        slot_in=torch.tensor([s.slot_in for s in sequences], device=device),
        slot_out=slot_out,
        exports=tuple(
            StateExport(sequence=index, position=export.position, slot=export.slot)
            for index, sequence in enumerate(sequences)
            for export in sequence.exports
        ),
        kv=pools.kv,
        states=pools.states,
    )
    token_ids = _concat([np.frombuffer(s.tokens, dtype=np.uint32) for s in sequences])
    return torch.from_numpy(token_ids).to(device), context


def _written(
    sequences: Sequence[SequencePlan], page_table: Tensor, positions: Tensor, pools: Pools
) -> tuple[Tensor, Tensor]:
    """Indices of the batch's tokens whose KV is written, and where to."""
    owners = np.repeat(np.arange(len(sequences)), [len(s.tokens) for s in sequences])
    kept = _concat([np.arange(s.start, s.end) >= s.write_from for s in sequences], dtype=bool)
    written = torch.from_numpy(np.flatnonzero(kept)).to(positions.device)
    rows = torch.from_numpy(owners[kept]).to(positions.device)
    where = positions[written]
    pages, offsets = page_table[rows, where // pools.page_size], where % pools.page_size
    return written, pages * pools.page_rows + offsets


def _concat(arrays: Sequence[np.ndarray], dtype: type = np.int64) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype)
