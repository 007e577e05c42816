"""Builds batches and pools by hand: what the runner does, in its plainest form."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.attention import rows_per_page
from milepost.kernels.layout.batch import Batch, Capacity, Operation
from milepost.kernels.mtp import Carried
from milepost.layers.context import (
    AttentionSpec,
    Context,
    RecurrentState,
    ShortConvSpec,
    StepArrays,
)
from milepost.models import Decoder
from milepost.runner.pools import zeros
from milepost.runner.staging import on_device


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
    fold: int = 0
    """Recorded tokens that the state is moved on by first."""


@dataclass
class Pools:
    """KV and states of every layer. Slots and pages but slot 0 hold NaN until they are written, and
    so does what lies beside pages, behind its zeros, and what slots carry."""

    kv: dict[int, Tensor]
    states: dict[int, RecurrentState]
    page_size: int
    operations: tuple[Operation, ...]
    conv_states: dict[int, Tensor] = field(default_factory=dict)
    carried: Carried | None = None

    def context(
        self, parts: list[Part], num_decodes: int = 0, *, last_tokens_only: bool = False
    ) -> Context:
        """The context of a step with these sequences, of which the first `num_decodes` decode."""
        page_rows = rows_per_page(next(iter(self.kv.values()))) if self.kv else 0
        batch = build_batch(parts, self.page_size, page_rows, num_decodes)
        layouts = {operation: operation.lay_out(batch) for operation in self.operations}
        step = on_device(_arrays(batch, layouts), batch.device)
        return Context(
            step=step,
            tables=None,
            kv=self.kv,
            states=self.states,
            conv_states=self.conv_states,
            carried=self.carried,
            last_tokens_only=last_tokens_only,
        )


def build_pools(
    model: Decoder,
    *,
    num_pages: int = 16,
    page_size: int = 64,
    num_slots: int = 8,
    state_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Pools:
    """Pools for a model's layers; `state_dtype` is float32, or float64 for a float64 model, and
    `kv_dtype` the model's."""
    dtype = model.dtype
    if state_dtype is None:
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    kv, states, conv_states = {}, {}, {}
    for index, spec in enumerate(model.layer_specs):
        if isinstance(spec, AttentionSpec):
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            kv[index] = build_pages(*shape, kv_dtype or dtype, rows_each=spec.rows_each)
        elif isinstance(spec, ShortConvSpec):
            conv_states[index] = _slots(num_pages + 1, spec.conv_shape, dtype)
        else:
            states[index] = RecurrentState(
                conv=_slots(num_slots, spec.conv_shape, dtype),
                recurrent=_slots(num_slots, spec.recurrent_shape, state_dtype),
            )
    carried = None
    if model.carried_size:
        carried = Carried(states=_slots(num_slots, (model.carried_size,), dtype))
    return Pools(kv, states, page_size, model.operations, conv_states, carried)


def build_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    rows_each: int = 2,
) -> Tensor:
    """A pool [pages, 2, page_size, num_kv_heads, head_dim] of NaN, with NaN between the pages: a
    row more than another layer has. With index keys a token has three rows (`rows_each`)."""
    num_rows = (2 + rows_each) * page_size + 1
    rows = torch.full(
        (num_pages, num_rows, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device
    )
    return rows[:, -rows_each * page_size :].unflatten(1, (rows_each, page_size))


def build_batch(parts: list[Part], page_size: int, page_rows: int, num_decodes: int = 0) -> Batch:
    """A step with these sequences, of which the first `num_decodes` decode, for the reference."""
    starts, lengths, slot_in, slot_out, write_from = (
        np.array([getattr(part, name) for part in parts])
        for name in ("start", "length", "slot_in", "slot_out", "write_from")
    )
    tables = np.zeros((len(parts), max(len(part.pages) for part in parts)), np.int32)
    for row, part in zip(tables, parts, strict=True):
        row[: len(part.pages)] = part.pages
    positions, owners = _positions(starts, lengths), np.repeat(np.arange(len(parts)), lengths)
    kv_rows = tables[owners, positions // page_size] * page_rows + positions % page_size
    return Batch(
        starts=starts,
        lengths=lengths,
        num_decodes=num_decodes,
        folds=np.array([part.fold for part in parts]),
        record_rows=np.arange(len(parts)),
        rows=np.arange(len(parts)),
        kv_rows=np.where(positions >= write_from[owners], kv_rows, -1),
        slot_in=slot_in,
        slot_out=slot_out,
        exports=tuple(
            (sequence, position, slot)
            for sequence, part in enumerate(parts)
            for position, slot in part.exports.items()
        ),
        tables=tables,
        page_size=page_size,
        page_rows=page_rows,
        capacity=Capacity(num_tokens=len(positions), num_sequences=len(parts), is_exact=True),
        device=torch.device("cpu"),
        chip=None,
    )


def _positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    )


def _arrays(batch: Batch, layouts: dict[Operation, object]) -> StepArrays:
    """Without token ids, which are given to the model by themselves."""
    nothing = np.empty(0, np.int64)
    return StepArrays(
        token_ids=nothing,
        positions=_positions(batch.starts, batch.lengths),
        kv_rows=batch.kv_rows,
        window_rows=batch.kv_rows,
        slot_in=batch.slot_in,
        slot_out=batch.slot_out,
        num_real=nothing,
        last_tokens=batch.lengths.cumsum() - 1,
        sources=nothing,
        num_sampled=nothing,
        layouts=layouts,
        decodes=batch.num_decodes == len(batch.starts),
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
