"""Drafts on a GPU after a step's sampling, without waiting for the host. A pass is a graph if one
was captured for enough requests.

Only the device knows how many drafts of the previous step were accepted. So the host lays out the
passes as if all were, and the device moves back the positions, KV rows and ends of attention items.
Passes work as in `plain`, with three differences: of a request's sampling parameters only the
temperature counts, a pass beyond the page table writes no KV, and attention reads the first row
like any other.

Legend: S requests, R sampled rows, C hidden size, K drafts verified in the step, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import sampling as layout
from milepost.kernels.attention import AttentionItems
from milepost.kernels.attention.tiles import BEGIN, END, FIRST, POSITION
from milepost.kernels.layout.batch import Batch, Capacity
from milepost.kernels.sampling import guess
from milepost.layers.context import Context, StepArrays
from milepost.models.decoder import Decoder
from milepost.runner.arrays import Geometry
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pools import Pools
from milepost.runner.sampling import SamplingRow, temperature_of
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.runner.tables import PageTables
from milepost.scheduler.plans import StepPlan

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArrays:
    """The host's inputs to a step's drafting passes: int arrays in numpy, tensors once sent."""

    first_rows: Any
    """[S] int64, each request's first sampled row."""
    positions: Any
    """[S] int64, the position after the certain token, where drafts begin if none was accepted."""
    shifts: Any
    """[S] int64, rotary positions minus `positions`."""
    verified: Any
    """[S, K] int64, the step's drafts; -1 after the last."""
    forced: Any
    """[S] int64, number of drafts accepted in any case; -1 if the sampled tokens decide."""
    table_rows: Any
    """[S] int64, rows of the page table."""
    reach: Any
    """[S] int64, the number of tokens that the page table has room for."""
    ints: Any
    """[S, 8] int32, how each request's tokens are chosen: like `StepRows.ints`, with the index of
    the first draft if none was accepted."""
    temperatures: Any
    """[S] float32, temperatures."""
    num_real: Any
    """[1] int32, the number of requests without padding."""
    items: Any
    """Items of attention with one token per request, at the furthest possible positions."""


class DeviceDrafting:
    """Drafts with `model` over `pools`, and the page `tables` of the previous steps. A step
    verifies up to `num_verified` drafts of each of up to `num_requests` requests."""

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        tables: PageTables,
        geometry: Geometry,
        *,
        num_requests: int,
        num_verified: int,
    ) -> None:
        assert model.mtp is not None, "only a model with a head drafts"
        self._model = model
        self._pools = pools
        self._tables = tables
        self._geometry = geometry
        self._operation = model.mtp.attention.operation
        self._num_verified = max(num_verified, 1)
        most = self._arrays(StepPlan(sequences=()), (), _NOBODY, num_requests)
        self._staging = Staging(pools.device, num_staged_bytes(most))
        num_rows = num_requests * (1 + num_verified)
        size, device = model.config.hidden_size, pools.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._sampled, self._hidden = zeros(num_rows), zeros(num_rows, size, dtype=model.dtype)
        # Kept between passes: the next pass's hidden states, positions and indices; and the drafts,
        # the last at the end.
        self._before = zeros(num_requests, size, dtype=model.dtype)
        self._positions = zeros(num_requests)
        self._indices = zeros(num_requests, dtype=torch.int32)
        self._drafts = zeros(num_requests, self._num_verified)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        """Maps a number of requests to the graphs of the first pass and of each further one."""

    @torch.inference_mode()
    def draft(
        self,
        flight: InFlightStep,
        rows: Sequence[SamplingRow],
        forced: Sequence[int] | np.ndarray,
        num_drafts: int,
    ) -> Tensor:
        """Returns [S, num_drafts] int64 drafts after the tokens of a flight's requests, in the
        flight's order. `rows` are its sampling rows; `forced` [S] is as in `DraftArrays`. A later
        call overwrites the tensor."""
        assert flight.hidden is not None
        num_rows, num_requests = len(flight.hidden), len(forced)
        self._sampled[:num_rows] = flight.token_ids
        self._hidden[:num_rows] = flight.hidden
        count = min((s for s in self._graphs if s >= num_requests), default=None)
        arrays = self._send(flight.plan, rows, np.asarray(forced), count or num_requests)
        for index in range(num_drafts):
            if count is not None:
                self._graphs[count][min(index, 1)].replay()
            else:
                self._pass(arrays, is_first=not index)
        return self._drafts[:num_requests, self._num_verified - num_drafts :]

    def capture(self, counts: Sequence[int]) -> None:
        """Records graphs of the passes for each of `counts`, which are numbers of requests."""
        pool = None
        for count in counts:
            arrays = self._send(StepPlan(sequences=()), (), _NOBODY, count)
            graphs = []
            for is_first in (True, False):
                self._pass(arrays, is_first=is_first)  # compiles kernels that are not compiled yet
                torch.cuda.synchronize()
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local"):
                    self._pass(arrays, is_first=is_first)
                pool = graphs[-1].pool()
            first, further = graphs
            self._graphs[count] = first, further

    def _send(
        self, plan: StepPlan, rows: Sequence[SamplingRow], forced: np.ndarray, count: int
    ) -> DraftArrays:
        host = self._arrays(plan, rows, forced, count)
        self._staging.send(host)
        return self._staging.views(host)

    def _arrays(
        self, plan: StepPlan, sampling: Sequence[SamplingRow], forced: np.ndarray, count: int
    ) -> DraftArrays:
        """Builds the arrays, padded to `count` requests."""
        sequences = [sequence for sequence in plan.sequences if sequence.samples]
        num, tables = len(sequences), self._tables.host
        num_verified = np.array([s.num_drafts for s in sequences], np.int64)
        positions = np.array([s.end - s.num_drafts for s in sequences], np.int64)
        rows = np.array(tables.places(sequences), np.int64)
        verified = np.full((count, self._num_verified), -1, np.int64)
        for row, sequence in enumerate(sequences):
            if sequence.num_drafts:
                ids = np.frombuffer(sequence.tokens, np.dtype("<u4"))
                verified[row, : sequence.num_drafts] = ids[len(ids) - sequence.num_drafts :]
        first_rows = (1 + num_verified).cumsum() - 1 - num_verified
        reach = [tables.num_covered(sequence.number) for sequence in sequences]
        ints = np.zeros((count, layout.NUM_INTS), np.int32)
        temperatures = np.ones(count, np.float32)
        for place, first in enumerate(first_rows.tolist()):
            ints[place], temperatures[place] = _choice_of(sampling[first])

        def padded(values: Any, filler: int = 0) -> np.ndarray:
            whole = np.full(count, filler, np.int64)
            whole[:num] = values
            return whole

        furthest = positions + num_verified + self._num_verified - 1
        last = np.minimum(furthest, padded(reach)[:num] - 1)
        items = self._operation.lay_out(self._batch(last, rows, count))
        assert isinstance(items, AttentionItems), "a head that drafts on a device attends there"
        return DraftArrays(
            first_rows=padded(first_rows),
            positions=padded(positions),
            shifts=padded([sequence.shift_after for sequence in sequences]),
            verified=verified,
            forced=padded(forced, -1),
            table_rows=padded(rows),
            reach=padded(reach),
            ints=ints,
            temperatures=temperatures,
            num_real=np.array([num], np.int32),
            # Pages that requests share are not read together.
            items=replace(items, wide=items.wide[:0]),
        )

    def _batch(self, starts: np.ndarray, rows: np.ndarray, count: int) -> Batch:
        """Returns a batch of one token per request. How far each reads is not known yet: every
        request has its own pages."""
        num, geometry = len(starts), self._geometry
        none = np.zeros(num, np.int64)
        return Batch(
            starts=starts,
            lengths=np.ones(num, np.int64),
            num_decodes=num,
            folds=none,
            record_rows=none - 1,
            rows=rows,
            kv_rows=none,
            slot_in=none,
            slot_out=none,
            exports=(),
            tables=np.arange(len(self._tables.host.rows), dtype=np.int32)[:, None],
            page_size=geometry.page_size,
            page_rows=geometry.page_rows,
            capacity=Capacity(num_tokens=count, num_sequences=count, decodes=True),
            device=geometry.device,
            chip=geometry.chip,
            has_float8_kv=geometry.has_float8_kv,
        )

    def _pass(self, arrays: DraftArrays, *, is_first: bool) -> None:
        """Adds one more draft to each request, after the sampled tokens or the previous draft."""
        num = len(arrays.first_rows)
        drafts, places = self._drafts[:num], (self._positions[:num], self._indices[:num])
        if is_first:
            row, num_accepted = self._accepted(arrays)
            token_ids, before = self._sampled[row], self._hidden[row]
            positions = arrays.positions + num_accepted
            indices = arrays.ints[:, layout.INDEX] + num_accepted.int()
        else:
            token_ids, before = drafts[:, -1].contiguous(), self._before[:num]
            positions, indices = (each + 1 for each in places)
        hidden = self._model.draft(token_ids, before, self._context(arrays, positions))
        logits = self._model.compute_logits(hidden)
        guessed = guess(logits, arrays.ints, arrays.temperatures, indices)
        drafts.copy_(torch.cat((drafts[:, 1:], guessed[:, None]), 1))
        self._before[:num] = hidden
        for place, value in zip(places, (positions, indices), strict=True):
            place.copy_(value)

    def _accepted(self, arrays: DraftArrays) -> tuple[Tensor, Tensor]:
        """Returns for each request the row of its last accepted token, and how many drafts were
        accepted."""
        rows = arrays.first_rows[:, None] + torch.arange(
            self._num_verified, device=arrays.verified.device
        )
        is_right = self._sampled[rows.clamp(max=len(self._sampled) - 1)] == arrays.verified
        num_right = is_right.long().cumprod(1).sum(1)
        num_accepted = torch.where(arrays.forced < 0, num_right, arrays.forced)
        return arrays.first_rows + num_accepted, num_accepted

    def _context(self, arrays: DraftArrays, positions: Tensor) -> Context:
        """Builds the context of one pass."""
        tables, geometry = self._tables.on_device, self._geometry
        page = (positions // geometry.page_size).clamp(max=tables.shape[1] - 1)
        pages = tables.view(-1)[arrays.table_rows * tables.shape[1] + page].long()
        kv_rows = pages * geometry.page_rows + positions % geometry.page_size
        turned = (positions + arrays.shifts).clamp(max=self._model.num_positions - 1)
        nothing = arrays.num_real
        step = StepArrays(
            token_ids=nothing,
            positions=turned.int(),
            kv_rows=torch.where(positions < arrays.reach, kv_rows, -1),
            slot_in=nothing,
            slot_out=nothing,
            num_real=arrays.num_real,
            last_tokens=nothing,
            sources=nothing,
            num_sampled=nothing,
            layouts={self._operation: _moved(arrays.items, positions, arrays.reach)},
            decodes=True,
        )
        return Context(
            step=step, tables=tables, kv=self._pools.kv, states={}, conv_states={}, carried=None
        )


def _choice_of(row: SamplingRow) -> tuple[np.ndarray, float]:
    """Returns a request's columns: how the token after this row's is chosen."""
    ints = np.zeros(layout.NUM_INTS, np.int64)
    ints[layout.KIND] = 0 if row.takes_the_best else layout.DRAWS
    ints[layout.INDEX] = row.index + 1
    ints[layout.SEED_LOW], ints[layout.SEED_HIGH] = layout.seed_words(row.seed)
    return ints.astype(np.uint32).view(np.int32), temperature_of(row)


def _moved(items: AttentionItems, positions: Tensor, reach: Tensor) -> AttentionItems:
    """Moves items back to the tokens' own `positions` [S], which lie no further on. An item that
    begins after its token has nothing to do, and its partial result no weight."""
    narrow = items.narrow.clone()
    first = narrow[:, FIRST].long()
    narrow[:, POSITION] = positions[first].int()
    ends = torch.minimum(positions + 1, reach)[first].int()
    narrow[:, END] = torch.minimum(narrow[:, END], torch.maximum(ends, narrow[:, BEGIN]))
    return replace(items, narrow=narrow)
