"""Runs a step on a GPU with fused kernels, and as a CUDA graph if a captured one fits. Nothing
waits for the device.

The host builds a step's arrays, sends them in one copy, and launches; the tokens are copied back on
their own. Two steps may be in flight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from milepost.images import ImageSettings
from milepost.kernels.layout.batch import Batch, Capacity, Operation
from milepost.kernels.platform.device import allows_hopper_kernels, as_made, probe
from milepost.kernels.rows import take
from milepost.kernels.sampling import argmax
from milepost.layers.context import Context, PictureRows, StepArrays
from milepost.layers.parts import Layer
from milepost.models.decoder import Decoder
from milepost.progress import track
from milepost.runner import arrays
from milepost.runner.arrays import Geometry
from milepost.runner.choice import Drafts, PromptScores, choice_of, score_prompts, wants_scores
from milepost.runner.device_drafting import DeviceDrafting
from milepost.runner.graphs import Graphs, GraphSplit, SplitHere, StepOutputs, exact_capacity
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pictures import EncodedPictures, rows_of
from milepost.runner.pools import Pools
from milepost.runner.sampling import SamplingRow, are_plain
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.runner.tables import PageTables, RecordRows
from milepost.scheduler.plans import StepPlan

_NOTHING = StepPlan(sequences=())


class DeviceExecutor:
    """Runs `model` over `pools`. `max_model_len` bounds any sequence, `largest` any step."""

    keeps_counts = True

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        *,
        num_requests: int,
        max_model_len: int,
        largest: Capacity,
        image_settings: ImageSettings | None = None,
    ) -> None:
        self.model = model
        self.pictures = EncodedPictures.of(model, image_settings)
        self.allows_hopper = allows_hopper_kernels()
        self._pools = pools
        sizes = num_requests, -(-max_model_len // pools.page_size), pools.page_size
        self._tables = PageTables(*sizes, pools.device, has_windows=pools.all_windows is not None)
        self._geometry = Geometry.of(model, pools, probe(pools.device))
        most = [
            arrays.build(_NOTHING, self._tables.host, self._geometry, capacity)
            for capacity in {largest, replace(largest, num_drafts=0)}
        ]
        self._staging = Staging(pools.device, max(map(num_staged_bytes, most)))
        self._pieces = GraphSplit(model)
        seconds = [{each: step.layouts[each] for each in self._pieces.second} for step in most]
        self._second_staging = Staging(pools.device, max(map(num_staged_bytes, seconds)))
        self._graphs = Graphs()
        self._records = RecordRows(pools.num_record_rows)
        self._num_drafts = largest.num_drafts
        self._drafting = None
        if model.mtp is not None:
            self._drafting = DeviceDrafting(
                model,
                pools,
                self._tables,
                self._geometry,
                num_requests=largest.num_sequences,
                num_verified=largest.num_drafts,
            )
        # Imported here because triton need not be installed on machines without a GPU.
        from milepost.runner.sampler import Sampler

        self._sampler = Sampler(largest.num_sequences, model.vocab_size, pools.device)

    @torch.inference_mode()
    @as_made
    def launch(self, plan: StepPlan, before: InFlightStep | None) -> InFlightStep:
        """Queues one forward pass."""
        new_pages = self._tables.host.follow(plan)
        self._records.follow(plan)
        exact = exact_capacity(plan)
        is_plain = not wants_scores(plan) and not plan.has_pictures
        captured = self._graphs.find(exact) if is_plain else None
        capacity = captured or exact
        if not capacity.num_tokens:
            capacity = replace(capacity, num_tokens=1)  # a kernel needs at least one token
        is_cut = self._pieces.cut(capacity)
        if not is_cut:
            self._tables.send(new_pages)
        sources = before.places(plan) if before is not None else ()
        step, batch = arrays.begin(
            plan, self._tables.host, self._geometry, capacity, sources, self._records
        )
        operations = self._pieces.first if is_cut else self._geometry.operations
        step = replace(step, layouts=arrays.lay_out(batch, operations))

        def send_rest() -> dict[Operation, Any]:
            self._tables.send(new_pages)
            return self._send_second(batch)

        queued_s, is_late = perf_counter(), before is not None and before.is_done
        begun = self._staging.send(step)
        views = None if captured and not sources else self._staging.views(step)
        if before is not None and sources:
            assert views is not None
            num = len(sources)
            torch.index_select(before.token_ids, 0, views.sources[:num], out=views.token_ids[:num])
        outcome = self._graphs.replay(captured, send_rest) if captured is not None else None
        numbers = plan.sampled_numbers  # a captured graph is running by now
        scores: list[PromptScores] = []
        if outcome is None:
            assert views is not None
            outcome, scores = self._launch(plan, views, capacity, send_rest if is_cut else None)
        if not numbers:
            return InFlightStep(plan=plan, numbers=numbers, prompt_scores=scores)
        num = len(numbers)
        return InFlightStep(
            plan=plan,
            numbers=numbers,
            begun=begun,
            queued_s=queued_s,
            is_late=is_late,
            logits=outcome.logits[:num],
            hidden=outcome.hidden[:num],
            best=outcome.best[:num],
            prompt_scores=scores,
        )

    def _launch(
        self,
        plan: StepPlan,
        views: StepArrays,
        capacity: Capacity,
        send_rest: Callable[[], dict[Operation, Any]] | None,
    ) -> tuple[StepOutputs, list[PromptScores]]:
        """Launches kernel by kernel; `send_rest` sends the arrays of a step's second piece."""
        layouts = dict(views.layouts)

        def cut() -> None:
            if send_rest is not None:
                layouts.update(self._second_staging.views(send_rest()))

        last_tokens_only = self.model.ends_early(capacity) and not wants_scores(plan)
        outcome, hidden = self._compute(
            replace(views, layouts=layouts),
            len(plan.sampled_numbers),
            cut=cut,
            last_tokens_only=last_tokens_only,
            pictures=rows_of(self.pictures, plan, self._geometry.merge_size),
        )
        return outcome, score_prompts(plan, hidden, self.model.compute_logits)

    @torch.inference_mode()
    @as_made
    def sample(self, flight: InFlightStep, rows: Sequence[SamplingRow]) -> None:
        """Queues the sampling of a flight's tokens."""
        assert flight.logits is not None
        assert flight.best is not None
        token_ids = flight.best
        if not are_plain(rows):
            token_ids = self._sampler.choose(flight.numbers, flight.logits, flight.best, rows)
        flight.choice = choice_of(token_ids, flight.logits, [row.params for row in rows])

    @as_made
    def draft(self, flight: InFlightStep, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Queues the head's drafting passes."""
        assert self._drafting is not None, "only a model with a head drafts"
        numbers = list(dict.fromkeys(flight.numbers))
        drafts = self._drafting.draft(flight, rows, flight.num_forced(), num_drafts)
        flight.drafting = Drafts.of(numbers, drafts)

    @property
    def num_sampling_bytes(self) -> int:
        """Number of bytes of device memory kept for sampling."""
        return self._sampler.num_bytes

    @as_made
    def compile(self, capacities: Sequence[Capacity]) -> None:
        """Compiles the kernels of these steps, with a progress bar. Raises KernelError."""
        # Imported here because triton need not be installed on machines without a GPU.
        from milepost.runner.compiling import compiling_only

        layers = self.model.one_of_each_kind()
        with compiling_only(probe(self._pools.device), shows_progress=self.model.ranks.is_first):
            for capacity in capacities:
                self._run(capacity, self._padding(capacity), layers=layers)
            self._sampler.rehearse(self.model.dtype)

    @as_made
    def capture(self, capacities: Sequence[Capacity]) -> None:
        """Records graphs of these steps, with a progress bar."""
        for capacity in track(capacities, "capturing graphs", is_shown=self.model.ranks.is_first):
            run = partial(self._run, capacity, self._padding(capacity))
            is_cut = self._pieces.cut(capacity)
            self._graphs.capture(capacity, run if is_cut else partial(_run_whole, run))
        if self._drafting is not None and self._num_drafts:
            counts = {each.num_sequences for each in capacities if each.decodes}
            self._drafting.capture(sorted(counts, reverse=True))

    @as_made
    def measure(self, capacity: Capacity) -> int:
        """Returns the largest number of bytes that a step takes, measured with padding, which takes
        as many."""
        device = self._pools.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._run(capacity, self._padding(capacity))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before

    def _padding(self, capacity: Capacity) -> StepArrays:
        step, batch = arrays.begin(_NOTHING, self._tables.host, self._geometry, capacity)
        is_cut = self._pieces.cut(capacity)
        operations = self._pieces.first if is_cut else self._geometry.operations
        step = replace(step, layouts=arrays.lay_out(batch, operations))
        self._staging.send(step)
        views = self._staging.views(step)
        if not is_cut:
            return views
        others = self._second_staging.views(self._send_second(batch))
        return replace(views, layouts={**views.layouts, **others})

    def _send_second(self, batch: Batch) -> dict[Operation, Any]:
        """Sends the arrays that only the second piece of a step reads, and returns them."""
        rest = arrays.lay_out(batch, self._pieces.second)
        self._second_staging.send(rest)
        return rest

    @torch.inference_mode()
    def _run(
        self,
        capacity: Capacity,
        step: StepArrays,
        cut: SplitHere | None = None,
        *,
        layers: Sequence[Layer] | None = None,
    ) -> StepOutputs:
        last_tokens_only, num_rows = self.model.ends_early(capacity), capacity.num_sampled
        return self._compute(step, num_rows, layers, cut, last_tokens_only=last_tokens_only)[0]

    def _compute(
        self,
        step: StepArrays,
        num_rows: int,
        layers: Sequence[Layer] | None = None,
        cut: SplitHere | None = None,
        *,
        last_tokens_only: bool,
        pictures: PictureRows | None = None,
    ) -> tuple[StepOutputs, Tensor]:
        """Returns the outcome at the `num_rows` sampled positions, and all hidden states."""
        context = Context(
            step=step,
            tables=self._tables.on_device,
            window_tables=self._tables.windows,
            kv=self._pools.kv,
            states=self._pools.states,
            conv_states=self._pools.conv_states,
            carried=self._pools.carried,
            conv_records=self._pools.conv_records,
            last_tokens_only=last_tokens_only,
            pictures=pictures,
        )

        def before(index: int) -> None:
            if cut is not None and index == self._pieces.num_first:
                cut()

        hidden = self.model.forward(step.token_ids, context, layers, before)
        sampled = (
            hidden[:num_rows] if last_tokens_only else take(hidden, step.last_tokens[:num_rows])
        )
        logits = self.model.compute_logits(sampled, order=context.order)
        return StepOutputs(logits=logits, hidden=sampled, best=argmax(logits)), hidden


def _run_whole(run: Callable[[], StepOutputs], _: SplitHere) -> StepOutputs:
    """Runs a step without cutting it."""
    return run()
