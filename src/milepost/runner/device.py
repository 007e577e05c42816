"""Runs a step on a GPU with fused kernels, and as a CUDA graph if a captured one fits. Nothing
waits for the device.

The host builds a step's arrays, sends them in one copy, and launches; the tokens are copied back on
their own. Two steps may be in flight at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from milepost.kernels.layout.batch import Operation
from milepost.kernels.platform.device import allows_hopper_kernels, hopper_kernels, probe
from milepost.kernels.rows import take
from milepost.kernels.sampling import argmax
from milepost.layers.context import Context, StepArrays
from milepost.layers.parts import Layer
from milepost.models.decoder import Decoder
from milepost.runner import arrays
from milepost.runner.acceptance import accept_equal
from milepost.runner.arrays import Capacity, Geometry
from milepost.runner.choice import Drafts, SampledToken, choice_of, tensor_beside
from milepost.runner.device_drafting import DeviceDrafting
from milepost.runner.graph_split import GraphSplit
from milepost.runner.graphs import Graphs, SplitHere, StepOutputs, exact_capacity
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, allocate
from milepost.runner.prompt_scores import PromptScores, score_prompts, wants_scores
from milepost.runner.records import RecordRows
from milepost.runner.sampling import SamplingRow, are_plain, choose
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.runner.tables import PageTables
from milepost.scheduler.plans import StepPlan

_NOTHING = StepPlan(sequences=())


def _as_made(method: Callable[..., Any]) -> Callable[..., Any]:
    """Inside, kernels are allowed as where the executor was made, whichever thread calls it."""

    @wraps(method)
    def run(executor: DeviceExecutor, *given: Any, **how: Any) -> Any:
        with hopper_kernels(executor._allows_hopper):
            return method(executor, *given, **how)

    return run


class DeviceExecutor:
    """Runs `model` over `pools` on their GPU. `max_model_len` bounds any sequence, `largest` any
    step."""

    keeps_counts = True

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        *,
        num_requests: int,
        max_model_len: int,
        largest: Capacity,
    ) -> None:
        self.model = model
        self._allows_hopper = allows_hopper_kernels()
        self._pools = pools
        max_pages = -(-max_model_len // pools.page_size)
        self._tables = PageTables(num_requests, max_pages, pools.page_size, pools.device)
        self._geometry = Geometry(
            operations=model.operations,
            page_size=pools.page_size,
            page_rows=pools.page_rows,
            device=pools.device,
            chip=probe(pools.device),
            has_float8_kv=pools.has_float8_kv,
        )
        most = [
            arrays.build(_NOTHING, self._tables.host, self._geometry, capacity)
            for capacity in {largest, replace(largest, num_drafts=0)}
        ]
        self._staging = Staging(pools.device, max(map(num_staged_bytes, most)))
        self._pieces = GraphSplit(model)
        seconds = [{each: step.layouts[each] for each in self._pieces.second} for step in most]
        self._second_staging = Staging(pools.device, max(map(num_staged_bytes, seconds)))
        """Sends the arrays that only the second piece of a step reads."""
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
    @_as_made
    def launch(self, plan: StepPlan, before: InFlightStep | None) -> InFlightStep:
        """Queue one forward pass."""
        new_pages = self._tables.host.update(plan)
        self._records.follow(plan)
        exact = exact_capacity(plan)
        captured = None if wants_scores(plan) else self._graphs.find(exact)
        capacity = captured or exact
        if not capacity.num_tokens:
            capacity = replace(capacity, num_tokens=1)  # a kernel needs at least one token
        is_cut = self._pieces.cut(capacity)
        if not is_cut:
            self._tables.send(*new_pages)
        sources = before.places(plan) if before is not None else ()
        step, batch = arrays.begin(
            plan, self._tables.host, self._geometry, capacity, sources, self._records
        )
        operations = self._pieces.first if is_cut else self._geometry.operations
        step = replace(step, layouts=arrays.lay_out(batch, operations))

        def send_rest() -> dict[Operation, Any]:
            self._tables.send(*new_pages)
            rest = arrays.lay_out(batch, self._pieces.second)
            self._second_staging.send(rest)
            return rest

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
        """Launches kernel by kernel. `send_rest` sends the arrays of the second piece, once the
        kernels of the first are launched."""
        layouts = dict(views.layouts)

        def cut() -> None:
            if send_rest is not None:
                layouts.update(self._second_staging.views(send_rest()))

        last_tokens_only = self.model.ends_early(capacity) and not wants_scores(plan)
        step = replace(views, layouts=layouts)
        hidden = self._forward(step, cut=cut, last_tokens_only=last_tokens_only)
        outcome = self._outcome(
            hidden, step, len(plan.sampled_numbers), last_tokens_only=last_tokens_only
        )
        return outcome, score_prompts(plan, hidden, self.model.compute_logits)

    @torch.inference_mode()
    @_as_made
    def sample(self, flight: InFlightStep, rows: Sequence[SamplingRow]) -> None:
        """Queue the sampling of a flight's tokens."""
        assert flight.logits is not None
        assert flight.best is not None
        token_ids = flight.best
        if not are_plain(rows):
            token_ids = self._choose(flight.numbers, flight.logits, flight.best, rows)
        flight.choice = choice_of(token_ids, flight.logits, [row.params for row in rows])

    def _choose(
        self, numbers: Sequence[int], logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]
    ) -> Tensor:
        """Samples with the kernels, or with the reference if penalties apply to drafts: the token
        counts on the device do not include drafts."""
        times = Counter(numbers)
        apart = [
            index
            for index, (number, row) in enumerate(zip(numbers, rows, strict=True))
            if row.params.has_penalties and times[number] > 1
        ]
        if not apart:
            return self._sampler.choose(numbers, logits, best, rows)
        token_ids = best.clone()
        place = tensor_beside(apart, torch.int64, logits)
        token_ids[place] = choose(logits[place], [rows[index] for index in apart]).token_ids
        rest = [index for index in range(len(rows)) if index not in set(apart)]
        if rest:
            place = tensor_beside(rest, torch.int64, logits)
            own = [numbers[index] for index in rest], logits[place], best[place]
            token_ids[place] = self._sampler.choose(*own, [rows[index] for index in rest])
        return token_ids

    @_as_made
    def draft(self, flight: InFlightStep, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Queue the head's drafting passes."""
        assert self._drafting is not None, "only a model with a head drafts"
        numbers = list(dict.fromkeys(flight.numbers))
        drafts = self._drafting.draft(flight, rows, _forced(flight), num_drafts)
        flight.drafting = Drafts.of(numbers, drafts)

    @property
    def num_sampling_bytes(self) -> int:
        """Number of bytes of device memory kept for sampling."""
        return self._sampler.num_bytes

    @_as_made
    def compile(self, capacities: Sequence[Capacity]) -> None:
        """Compile the kernels of these steps, with a progress bar. Raises KernelError."""
        # Imported here because triton need not be installed on machines without a GPU.
        from milepost.runner.compiling import compiling_only

        layers = self.model.one_of_each_kind()
        with compiling_only(probe(self._pools.device)):
            for capacity in capacities:
                self._run(capacity, self._padding(capacity), layers=layers)
            self._sampler.rehearse(self.model.dtype)

    @_as_made
    def capture(self, capacities: Sequence[Capacity]) -> None:
        """Record graphs of these steps, with a progress bar."""
        for capacity in tqdm(capacities, desc="capturing CUDA graphs", dynamic_ncols=True):
            views, is_cut = self._padding(capacity), self._pieces.cut(capacity)

            def run(cut: SplitHere, views=views, capacity=capacity, is_cut=is_cut) -> StepOutputs:
                return self._run(capacity, views, cut if is_cut else None)

            self._graphs.capture(capacity, run)
        if self._drafting is not None and self._num_drafts:
            counts = {each.num_sequences for each in capacities if each.decodes}
            self._drafting.capture(sorted(counts, reverse=True))

    @_as_made
    def measure(self, capacity: Capacity) -> int:
        """Returns the most bytes that such a step takes. Padding is measured, which takes as much
        as any step of that size."""
        device = self._pools.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._run(capacity, self._padding(capacity))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before

    def _padding(self, capacity: Capacity) -> StepArrays:
        step, batch = arrays.begin(_NOTHING, self._tables.host, self._geometry, capacity)
        if not self._pieces.cut(capacity):
            step = replace(step, layouts=arrays.lay_out(batch, self._geometry.operations))
            self._staging.send(step)
            return self._staging.views(step)
        step = replace(step, layouts=arrays.lay_out(batch, self._pieces.first))
        rest = arrays.lay_out(batch, self._pieces.second)
        self._staging.send(step)
        self._second_staging.send(rest)
        views, others = self._staging.views(step), self._second_staging.views(rest)
        return replace(views, layouts={**views.layouts, **others})

    @torch.inference_mode()
    def _run(
        self,
        capacity: Capacity,
        step: StepArrays,
        cut: SplitHere | None = None,
        *,
        layers: Sequence[Layer] | None = None,
    ) -> StepOutputs:
        last_tokens_only = self.model.ends_early(capacity)
        hidden = self._forward(step, layers, cut, last_tokens_only=last_tokens_only)
        return self._outcome(hidden, step, capacity.num_sampled, last_tokens_only=last_tokens_only)

    def _forward(
        self,
        step: StepArrays,
        layers: Sequence[Layer] | None = None,
        cut: SplitHere | None = None,
        *,
        last_tokens_only: bool,
    ) -> Tensor:
        """Returns hidden states [T, features] of the step's tokens, or of the sampled positions
        only."""
        context = Context(
            step=step,
            tables=self._tables.on_device,
            kv=self._pools.kv,
            states=self._pools.states,
            conv_states=self._pools.conv_states,
            carried=self._pools.carried,
            conv_records=self._pools.conv_records,
            last_tokens_only=last_tokens_only,
        )

        def before(index: int) -> None:
            if cut is not None and index == self._pieces.num_first:
                cut()

        return self.model.forward(step.token_ids, context, layers, before)

    def _outcome(
        self, hidden: Tensor, step: StepArrays, num_rows: int, *, last_tokens_only: bool
    ) -> StepOutputs:
        own = hidden[:num_rows] if last_tokens_only else take(hidden, step.last_tokens[:num_rows])
        logits = self.model.compute_logits(own)
        return StepOutputs(logits=logits, hidden=own, best=argmax(logits))


def _forced(flight: InFlightStep) -> list[int]:
    """Returns how many drafts of each sampling request are accepted whatever is sampled, or -1 if
    the sampled tokens decide."""
    sampling = [sequence for sequence in flight.plan.sequences if sequence.samples]
    if flight.accept is accept_equal:
        return [-1] * len(sampling)
    unknown = SampledToken(-1)
    return [
        len(flight.accept(each, each.drafts, [unknown] * (1 + each.num_drafts))) - 1
        for each in sampling
    ]


def measure_activations(
    model: Decoder,
    shape: PoolShape,
    largest: Capacity,
    captured: Sequence[Capacity],
    max_model_len: int,
) -> int:
    """Measures the bytes that steps take besides weights and pools: the `largest` step, with a
    sequence of `max_model_len`, and the graphs of `captured` steps, which have memory of their own.
    Compiles the kernels of all these steps and of the sizes between, which may use others. Raises
    KernelError if one does not run."""
    device = model.embedding.device
    pools = allocate(shape, num_pages=1, num_slots=1, device=device)
    executor = DeviceExecutor(
        model, pools, num_requests=1, max_model_len=max_model_len, largest=largest
    )
    executor.compile([largest, *_uncaptured(largest, captured), *captured])
    outcomes = sum(each.num_sampled for each in captured) * model.vocab_size * model.dtype.itemsize
    largest_captured = max(captured, key=attrgetter("num_tokens"), default=None)
    steps = [each for each in (largest, largest_captured) if each is not None]
    return sum(map(executor.measure, steps)) + outcomes + executor.num_sampling_bytes


def _uncaptured(largest: Capacity, captured: Sequence[Capacity]) -> Iterator[Capacity]:
    """Yields steps that no graph covers, one for each choice of kernels by size. The last has one
    sequence and no drafts, since other kernels verify drafts."""
    num_tokens = max((each.num_tokens for each in captured), default=largest.num_sequences)
    while 3 * num_tokens // 2 < largest.num_tokens:
        # Kernels for experts change within a factor of two.
        yield replace(largest, num_tokens=3 * num_tokens // 2)
        num_tokens *= 2
        if num_tokens < largest.num_tokens:
            yield replace(largest, num_tokens=num_tokens)
    yield replace(largest, num_sequences=1, num_drafts=0)
