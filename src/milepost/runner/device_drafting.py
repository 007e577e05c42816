"""Drafts on a GPU, behind a step's sampling: nothing waits for the host, and all passes are one
graph where the number of requests is that of one.

How many drafts of the step before were accepted is found on the device. So the host lays out the
passes for the case that all were, and the device moves them back: positions, rows of KV, and the
ends of attention's items. What `drafting` says of passes holds here too; but drafts are greedy, a
pass that a page table does not reach writes no KV, and the first row is attended to like any other.

Legend: S requests, R sampled rows, C hidden size, K drafts judged in the step, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.attention import AttentionItems
from milepost.kernels.attention.items import BEGIN, END, FIRST, POSITION
from milepost.kernels.batch import Batch, Capacity
from milepost.kernels.sampling import argmax
from milepost.layers.context import Context, StepArrays
from milepost.models.decoder import Decoder
from milepost.runner.arrays import Geometry
from milepost.runner.flight import Flight
from milepost.runner.pools import Pools
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.runner.tables import PageTables
from milepost.scheduler.plans import StepPlan

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArrays:
    """What the host knows of a step's drafting passes: int arrays in numpy, tensors once sent."""

    first_rows: Any
    """[S] int64, each request's first sampled row."""
    positions: Any
    """[S] int64, of the token behind the certain one: where drafts begin if none was accepted."""
    judged: Any
    """[S, K] int64, the step's drafts; -1 behind the last."""
    forced: Any
    """[S] int64, how many are accepted whatever was sampled; -1 where that decides."""
    table_rows: Any
    """[S] int64"""
    reach: Any
    """[S] int64, tokens that the page table has room for."""
    num_real: Any
    """[1] int32"""
    items: Any
    """Of attention from one token a request, as far on as may be."""


class DeviceDrafting:
    """Drafts of `model` over `pools`, with the page `tables` of the steps before. A step judges up
    to `num_judged` drafts of each of up to `num_requests`."""

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        tables: PageTables,
        geometry: Geometry,
        *,
        num_requests: int,
        num_judged: int,
    ) -> None:
        assert model.mtp is not None, "only a model with a head drafts"
        self._model = model
        self._pools = pools
        self._tables = tables
        self._geometry = geometry
        self._operation = model.mtp.attention.operation
        self._num_judged = max(num_judged, 1)
        most = self._arrays(StepPlan(sequences=()), _NOBODY, num_requests, 0)
        self._staging = Staging(pools.device, num_staged_bytes(most))
        num_rows = num_requests * (1 + num_judged)
        size, device = model.config.hidden_size, pools.device
        self._sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(num_rows, size, dtype=model.dtype, device=device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def draft(self, flight: Flight, forced: Sequence[int] | np.ndarray, num_drafts: int) -> Tensor:
        """[S, num_drafts] int64 behind the tokens of a flight's requests, in its order; `forced`
        [S] as above. The tensor is overwritten by a later call."""
        assert flight.hidden is not None
        num_rows, num_requests = len(flight.hidden), len(forced)
        self._sampled[:num_rows] = flight.token_ids
        self._hidden[:num_rows] = flight.hidden
        counts = [s for s, made in self._graphs if s >= num_requests and made >= num_drafts]
        if not counts:
            arrays = self._send(flight.plan, np.asarray(forced), num_requests, num_drafts)
            return self._run(arrays, num_drafts)
        count = min(counts)
        made = min(n for s, n in self._graphs if s == count and n >= num_drafts)
        self._send(flight.plan, np.asarray(forced), count, made)
        graph, drafts = self._graphs[count, made]
        graph.replay()
        return drafts[:num_requests, :num_drafts]

    def capture(self, counts: Sequence[int], num_drafts: int, pool: Any = None) -> None:
        """Record graphs of as many drafts behind so many requests."""
        for count in counts:
            arrays = self._send(StepPlan(sequences=()), _NOBODY, count, num_drafts)
            self._run(arrays, num_drafts)  # compiles what is not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                drafts = self._run(arrays, num_drafts)
            pool = graph.pool()
            self._graphs[count, num_drafts] = graph, drafts

    # --- the host's part --------------------------------------------------------------------------

    def _send(self, plan: StepPlan, forced: np.ndarray, count: int, num_drafts: int) -> DraftArrays:
        host = self._arrays(plan, forced, count, num_drafts)
        self._staging.send(host)
        return self._staging.views(host)

    def _arrays(
        self, plan: StepPlan, forced: np.ndarray, count: int, num_drafts: int
    ) -> DraftArrays:
        """Padded to so many requests."""
        sequences = [sequence for sequence in plan.sequences if sequence.samples]
        num, tables = len(sequences), self._tables.host
        num_judged = np.array([s.num_drafts for s in sequences], np.int64)
        positions = np.array([s.end - s.num_drafts for s in sequences], np.int64)
        rows = np.array(tables.places(sequences), np.int64)
        judged = np.full((count, self._num_judged), -1, np.int64)
        for row, sequence in enumerate(sequences):
            if sequence.num_drafts:
                ids = np.frombuffer(sequence.tokens, np.dtype("<u4"))
                judged[row, : sequence.num_drafts] = ids[len(ids) - sequence.num_drafts :]
        first_rows = (1 + num_judged).cumsum() - 1 - num_judged
        reach = [tables.num_covered(sequence.number) for sequence in sequences]

        def padded(values: Any, filler: int = 0) -> np.ndarray:
            whole = np.full(count, filler, np.int64)
            whole[:num] = values
            return whole

        last = np.minimum(positions + num_judged + max(num_drafts - 1, 0), padded(reach)[:num] - 1)
        items = self._operation.lay_out(self._batch(last, rows, count))
        return DraftArrays(
            first_rows=padded(first_rows),
            positions=padded(positions),
            judged=judged,
            forced=padded(forced, -1),
            table_rows=padded(rows),
            reach=padded(reach),
            num_real=np.array([num], np.int32),
            # Pages that neighbours share are not read together.
            items=replace(items, wide=items.wide[:0]),
        )

    def _batch(self, starts: np.ndarray, rows: np.ndarray, count: int) -> Batch:
        """One token of each request, in pages that it shares with nobody: how far each reads is
        not known yet."""
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
        )

    # --- the device's part ------------------------------------------------------------------------

    def _run(self, arrays: DraftArrays, num_drafts: int) -> Tensor:
        """All passes."""
        rows = arrays.first_rows[:, None] + torch.arange(
            self._num_judged, device=arrays.judged.device
        )
        is_right = self._sampled[rows.clamp(max=len(self._sampled) - 1)] == arrays.judged
        num_right = is_right.long().cumprod(1).sum(1)
        num_accepted = torch.where(arrays.forced < 0, num_right, arrays.forced)
        row = arrays.first_rows + num_accepted
        token_ids, before = self._sampled[row], self._hidden[row]
        positions = arrays.positions + num_accepted
        contexts = [self._context(arrays, positions + index) for index in range(num_drafts)]
        drafts = []
        for context in contexts:
            before = self._model.draft(token_ids, before, context)
            token_ids = argmax(self._model.compute_logits(before))
            drafts.append(token_ids)
        return torch.stack(drafts, 1)

    def _context(self, arrays: DraftArrays, positions: Tensor) -> Context:
        """Of one pass."""
        tables, geometry = self._tables.on_device, self._geometry
        page = (positions // geometry.page_size).clamp(max=tables.shape[1] - 1)
        pages = tables.view(-1)[arrays.table_rows * tables.shape[1] + page].long()
        kv_rows = pages * geometry.page_rows + positions % geometry.page_size
        turned = positions.clamp(max=self._model.num_positions - 1)
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
            layouts={self._operation: _moved(arrays.items, positions, arrays.reach)},
            decodes=True,
        )
        return Context(
            step=step, tables=tables, kv=self._pools.kv, states={}, conv_states={}, carried=None
        )


def _moved(items: AttentionItems, positions: Tensor, reach: Tensor) -> AttentionItems:
    """The same items up to the tokens' own `positions` [S], which lie no further on. One that
    begins behind them has nothing to do, and its partial result no weight."""
    narrow = items.narrow.clone()
    first = narrow[:, FIRST].long()
    narrow[:, POSITION] = positions[first].int()
    ends = torch.minimum(positions + 1, reach)[first].int()
    narrow[:, END] = torch.minimum(narrow[:, END], torch.maximum(ends, narrow[:, BEGIN]))
    return replace(items, narrow=narrow)
