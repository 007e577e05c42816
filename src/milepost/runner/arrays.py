"""Builds a step's arrays on the host.

All that a GPU needs to know about a step goes there in one copy (see `staging`). Arrays are padded
to the capacity, so that a captured graph can read those of any step that fits.

Legend: T tokens, S sequences, R sampled positions, each with its capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from milepost.cache.tree import TOKEN_BYTES
from milepost.kernels.layout.batch import (
    Batch,
    Capacity,
    Ints,
    Operation,
    WindowPages,
    ordinals_of,
    padded,
)
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.context import StepArrays
from milepost.models.decoder import Decoder
from milepost.models.many import follows_many
from milepost.runner.pools import Pools
from milepost.runner.positions import shifted
from milepost.runner.tables import NO_ROW, HostTables, RecordRows
from milepost.scheduler.plans import SequencePlan, StepPlan

_NUM_REMEMBERED = 64
"""Number of step shapes (the sequences' lengths) whose spread is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The properties of a model, its pools and its device that shape a step's arrays."""

    operations: tuple[Operation, ...]
    page_size: int
    page_rows: int
    """Number of KV rows from one page to the next."""
    device: torch.device
    chip: Chip | None
    """The GPU's properties, or None if the reference kernels run."""
    has_float8_kv: bool = False
    follows_many: bool = False
    """Whether prefills of few tokens are added up as those of many are."""
    window_page_rows: int = 0
    """Number of KV rows from one window page to the next."""
    merge_size: int | None = None
    """Patches of a token's side, if a picture's tokens have rows and columns for positions."""

    @staticmethod
    def of(model: Decoder, pools: Pools, chip: Chip | None) -> Geometry:
        """Returns those of a model with these pools. On a `chip` its fused kernels run."""
        has_float8_kv = chip is not None and pools.has_float8_kv
        return Geometry(
            operations=model.operations,
            page_size=pools.page_size,
            page_rows=pools.page_rows,
            device=pools.device,
            chip=chip,
            has_float8_kv=has_float8_kv,
            follows_many=chip is not None
            and follows_many(model, chip, has_float8_kv=has_float8_kv),
            window_page_rows=pools.window_page_rows,
            merge_size=model.merge_size,
        )


def build(
    plan: StepPlan,
    tables: HostTables,
    geometry: Geometry,
    capacity: Capacity,
    sources: Sequence[int] = (),
    records: RecordRows | None = None,
) -> StepArrays:
    """Builds the arrays of a plan that `tables` have followed, and `records` if anything is
    drafted. An empty plan is all padding. `sources` [T] are the rows of the previous step that
    sample this plan's tokens."""
    step, batch = begin(plan, tables, geometry, capacity, sources, records)
    return replace(step, layouts=lay_out(batch, geometry.operations))


def lay_out(batch: Batch, operations: Iterable[Operation]) -> dict[Operation, Any]:
    """Lays out each operation's own arrays."""
    return {operation: operation.lay_out(batch) for operation in operations}


def begin(
    plan: StepPlan,
    tables: HostTables,
    geometry: Geometry,
    capacity: Capacity,
    sources: Sequence[int] = (),
    records: RecordRows | None = None,
) -> tuple[StepArrays, Batch]:
    """Returns arrays without layouts, and the batch to lay them out from; otherwise as `build`."""
    columns = Columns.of(plan.sequences)
    num_sampled = columns.samples * (1 + columns.num_drafts)
    spread = _spread(columns.lengths.tobytes(), num_sampled.tobytes())
    positions = columns.starts[spread.owners] + spread.ordinals
    turned = shifted(plan.sequences, positions, columns.shifts, spread.owners, geometry.merge_size)
    batch = _batch(plan, columns, positions, spread.owners, tables, records, geometry, capacity)
    if tables.windows is not None:
        windows = _window_pages(plan, positions, spread.owners, tables.windows, geometry)
        batch = replace(batch, windows=windows)
    num_tokens, num_sequences = capacity.num_tokens, capacity.num_sequences
    step = StepArrays(
        token_ids=padded(token_ids(plan.sequences), num_tokens, 0, np.int64),
        positions=padded(turned, num_tokens, 0),
        kv_rows=padded(batch.kv_rows, num_tokens, -1, np.int64),
        window_rows=None
        if batch.windows is None
        else padded(batch.windows.kv_rows, num_tokens, -1, np.int64),
        slot_in=padded(columns.slot_in, num_sequences, 0),
        slot_out=padded(columns.slot_out, num_sequences, -1),
        num_real=np.array([len(positions)], np.int32),
        last_tokens=padded(spread.sampled, capacity.num_sampled, 0, np.int64),
        sources=padded(sources, num_sequences, 0, np.int64),
        num_sampled=np.array([len(spread.sampled)], np.int32),
        layouts={},
        decodes=capacity.decodes,
        order=batch.order,
    )
    return step, batch


class _Spread(NamedTuple):
    """Maps a step's tokens to its sequences."""

    owners: Ints
    """[T], the sequence of each token."""
    ordinals: Ints
    """[T], the place of each token in its sequence."""
    sampled: Ints
    """Indices of the tokens to sample after."""


@lru_cache(maxsize=_NUM_REMEMBERED)
def _spread(lengths: bytes, num_sampled: bytes) -> _Spread:
    """Spreads tokens over sequences of the given lengths that sample after their last `num_sampled`
    tokens. Cached: most steps have the shape of the previous one."""
    token_counts, last = np.frombuffer(lengths, np.int64), np.frombuffer(num_sampled, np.int64)
    sampled = (token_counts.cumsum() - last).repeat(last) + ordinals_of(last)
    return _Spread(
        np.arange(len(token_counts)).repeat(token_counts), ordinals_of(token_counts), sampled
    )


_read_columns = attrgetter(
    *("start", "num_tokens", "fold", "slot_in", "slot_out", "write_from", "samples", "num_drafts"),
    "shift",
)


class Columns(NamedTuple):
    """Fields of a step's sequences as columns, [S] int64 each."""

    starts: Ints
    lengths: Ints
    folds: Ints
    slot_in: Ints
    slot_out: Ints
    write_from: Ints
    samples: Ints
    num_drafts: Ints
    shifts: Ints

    @staticmethod
    def of(sequences: Sequence[SequencePlan]) -> Columns:
        """Reads all fields in one pass: there may be hundreds of sequences, with a device waiting
        for their step."""
        width = len(Columns._fields)
        rows = chain.from_iterable(map(_read_columns, sequences))
        numbers = np.fromiter(rows, np.int64, width * len(sequences))
        return Columns(*numbers.reshape(-1, width).T)


def _batch(
    plan: StepPlan,
    columns: Columns,
    positions: Ints,
    owners: Ints,
    tables: HostTables,
    records: RecordRows | None,
    geometry: Geometry,
    capacity: Capacity,
) -> Batch:
    """Collects the data that operations lay out, for tokens at `positions` [T] of sequences
    `owners` [T]."""
    sequences = plan.sequences
    rows = np.array(tables.places(sequences), np.int64)
    ordinals = positions // geometry.page_size
    entries = rows[owners] * tables.rows.shape[1] + ordinals
    pages = tables.rows.reshape(-1).take(entries).astype(np.int64)
    kv_rows = pages * geometry.page_rows + (positions - ordinals * geometry.page_size)
    kv_rows[positions < columns.write_from[owners]] = -1
    is_like_many = geometry.follows_many and not capacity.decodes
    return Batch(
        starts=columns.starts,
        lengths=columns.lengths,
        num_decodes=plan.num_decodes,
        folds=columns.folds,
        record_rows=_record_rows(sequences, records),
        samples=columns.samples,
        recorded=None if records is None else np.array(records.recorded(sequences), np.int64),
        rows=rows,
        kv_rows=kv_rows,
        slot_in=columns.slot_in,
        slot_out=columns.slot_out,
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
        order=SumOrder.LIKE_MANY if is_like_many else SumOrder.FREE,
    )


def _window_pages(
    plan: StepPlan, positions: Ints, owners: Ints, windows: HostTables, geometry: Geometry
) -> WindowPages:
    """Returns where tokens at `positions` [T] of sequences `owners` [T] are in layers with a
    sliding window. All of them are written, since a request shares none of the window pages that it
    writes."""
    places = np.array(windows.places(plan.sequences), np.int64)
    ordinals, offsets = np.divmod(positions, geometry.page_size)
    pages = windows.rows[places[owners], ordinals].astype(np.int64)
    return WindowPages(
        kv_rows=pages * geometry.window_page_rows + offsets,
        tables=windows.rows,
        page_rows=geometry.window_page_rows,
    )


def token_ids(sequences: Sequence[SequencePlan]) -> np.ndarray:
    """Returns the token ids of a whole step, uint32; 0 for tokens that are not known yet."""
    known = b"".join(s.tokens or bytes(TOKEN_BYTES * s.num_tokens) for s in sequences)
    return np.frombuffer(known, np.dtype("<u4"))


def _record_rows(sequences: Sequence[SequencePlan], records: RecordRows | None) -> np.ndarray:
    if records is None:
        return np.full(len(sequences), NO_ROW, np.int64)
    return np.array(records.rows(sequences), np.int64)
