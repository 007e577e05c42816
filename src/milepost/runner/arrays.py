"""Builds a step's arrays on the host.

Everything a GPU needs to know of a step goes there in one copy (see `staging`). With a capacity,
arrays are as long as any step's that fits, so that a captured graph can read them.

Legend: T tokens, S sequences, R tokens behind which is sampled, each with its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from milepost.cache.tree import TOKEN_BYTES
from milepost.kernels.batch import Batch, Capacity, Operation
from milepost.kernels.device import Chip
from milepost.layers.context import StepArrays
from milepost.runner.records import NO_ROW, RecordRows
from milepost.runner.tables import HostTables
from milepost.scheduler.plans import SequencePlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What of a model, its pools and its device a step's arrays depend on."""

    operations: tuple[Operation, ...]
    page_size: int
    page_rows: int
    """Rows of KV from one page to the next."""
    device: torch.device
    chip: Chip | None
    """None where the reference kernels run."""
    has_float8_kv: bool = False


def build(
    plan: StepPlan,
    tables: HostTables,
    geometry: Geometry,
    capacity: Capacity,
    last_tokens: Sequence[int] = (),
    sources: Sequence[int] = (),
    records: RecordRows | None = None,
) -> StepArrays:
    """The arrays of a plan that `tables` have followed, and `records` if anything is drafted; an
    empty plan is all padding.

    `last_tokens` [R] are the tokens behind which is sampled, `sources` [T] the rows of the step
    before in which a plan's tokens are sampled.
    """
    batch, positions = _batch(plan, tables, records, geometry, capacity)
    num_tokens, num_sequences = capacity.num_tokens, capacity.num_sequences
    return StepArrays(
        token_ids=_padded(token_ids(plan.sequences), num_tokens, 0, np.int64),
        positions=_padded(positions, num_tokens, 0),
        kv_rows=_padded(batch.kv_rows, num_tokens, -1, np.int64),
        slot_in=_padded(batch.slot_in, num_sequences, 0),
        slot_out=_padded(batch.slot_out, num_sequences, -1),
        num_real=np.array([len(positions)], np.int32),
        last_tokens=_padded(last_tokens, capacity.num_sampled, 0, np.int64),
        sources=_padded(sources, num_sequences, 0, np.int64),
        layouts={operation: operation.lay_out(batch) for operation in geometry.operations},
        decodes=capacity.decodes,
    )


def _batch(
    plan: StepPlan,
    tables: HostTables,
    records: RecordRows | None,
    geometry: Geometry,
    capacity: Capacity,
) -> tuple[Batch, np.ndarray]:
    """What operations lay out, and each token's position."""
    sequences = plan.sequences
    starts = np.array([s.start for s in sequences], np.int64)
    lengths = np.array([s.num_tokens for s in sequences], np.int64)
    rows = np.array(tables.places(sequences), np.int64)
    owners = np.repeat(np.arange(len(sequences)), lengths)
    positions = np.arange(len(owners)) + (starts - lengths.cumsum() + lengths)[owners]
    batch = Batch(
        starts=starts,
        lengths=lengths,
        num_decodes=plan.num_decodes,
        folds=np.array([s.fold for s in sequences], np.int64),
        record_rows=_record_rows(sequences, records),
        recorded=None if records is None else np.array(records.recorded(sequences), np.int64),
        rows=rows,
        kv_rows=_kv_rows(sequences, positions, owners, rows, tables, geometry),
        slot_in=np.array([s.slot_in for s in sequences], np.int64),
        slot_out=np.array([s.slot_out for s in sequences], np.int64),
        exports=tuple(
            (index, export.position, export.slot)
            for index, sequence in enumerate(sequences)
            for export in sequence.exports
        ),
        tables=tables.rows,
        page_size=geometry.page_size,
        page_rows=geometry.page_rows,
        capacity=capacity,
        device=geometry.device,
        chip=geometry.chip,
        has_float8_kv=geometry.has_float8_kv,
    )
    return batch, positions


def token_ids(sequences: Sequence[SequencePlan]) -> np.ndarray:
    """Of a whole step, uint32; 0 for those that are not known yet."""
    known = b"".join(s.tokens or bytes(TOKEN_BYTES * s.num_tokens) for s in sequences)
    return np.frombuffer(known, np.dtype("<u4"))


def _record_rows(sequences: Sequence[SequencePlan], records: RecordRows | None) -> np.ndarray:
    if records is None:
        return np.full(len(sequences), NO_ROW, np.int64)
    return np.array(records.rows(sequences), np.int64)


def _kv_rows(
    sequences: Sequence[SequencePlan],
    positions: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
    tables: HostTables,
    geometry: Geometry,
) -> np.ndarray:
    """Where each token's KV goes; -1 for those that are in shared pages already."""
    pages = tables.rows[rows[owners], positions // geometry.page_size].astype(np.int64)
    kv_rows = pages * geometry.page_rows + positions % geometry.page_size
    write_from = np.array([s.write_from for s in sequences], np.int64)
    return np.where(positions >= write_from[owners], kv_rows, -1)


def _padded(
    values: Sequence[int] | np.ndarray, length: int, filler: int, dtype: type = np.int32
) -> np.ndarray:
    padded = np.full(length, filler, dtype)
    padded[: len(values)] = values
    return padded
