"""Executes step plans on the model. The only part that knows both plans and tensors.

Keeps, beside the pools, the position that each slot's contents have consumed, and refuses to read a
slot that holds another one than the plan says. Everything it is told is data that could come from
another process or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from milepost.cache.memory import ZERO_SLOT
from milepost.runner.acceptance import Accept, accept_equal
from milepost.runner.choice import SampledToken
from milepost.runner.flight import Flight
from milepost.runner.histories import Histories
from milepost.runner.pools import Pools
from milepost.runner.prompt_scores import PromptScores
from milepost.runner.recording import Log, PoolRelease, Record, Rollback
from milepost.runner.sampling import SamplingRow
from milepost.scheduler.plans import Load, SamplingPlan, StepPlan, StepResult, StepSampling, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """A step's report for the scheduler, and the sampled tokens with what was asked about them."""

    result: StepResult
    sampled: Mapping[int, Sequence[SampledToken]]
    """By request number."""
    read_drafts: Callable[[], Mapping[int, Sequence[int]]] = dict
    """Waits for what may follow these tokens, by request number: the device is still at it."""
    prompt_scores: Sequence[PromptScores] = ()


class Executor(Protocol):
    """Computes a step; launches may return before the device is done."""

    keeps_counts: bool
    """Whether it counts the tokens of answers itself, so that penalties wait for none."""

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight:
        """Queue a forward pass behind what is queued already.

        A sequence that is ahead takes its token from the flight `before`.
        """
        ...

    def sample(self, flight: Flight, rows: Sequence[SamplingRow]) -> None:
        """Queue the sampling of a flight's tokens, with a row for each of its requests, in their
        order. Before the next forward pass, and once.
        """
        ...

    def draft(self, flight: Flight, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Queue drafts of the model's head behind a flight's tokens, up to so many for each of its
        requests. Right behind `sample`, with its rows.
        """
        ...


class Carrier(Protocol):
    """Copies between the pools and somewhere else; may return before anything is copied, in the
    order of what is launched on the device.
    """

    def store(self, stores: Sequence[Store]) -> None:
        """Copy out what the pools hold there now."""
        ...

    def load(self, load: Load) -> None:
        """Fill what nothing that is launched from now on reads until it is said to be there."""
        ...


class Runner:
    """Runs steps over `pools` with an executor; one step at a time, or one ahead. Others' copies
    are made by the carriers, by the name of the source.
    """

    def __init__(
        self,
        executor: Executor,
        pools: Pools,
        *,
        num_slots: int,
        logs: Sequence[Log] = (),
        accept: Accept = accept_equal,
        wait: Callable[[torch.cuda.Event], object] | None = None,
    ) -> None:
        self.executor = executor
        self.pools = pools
        self._accept = accept
        self._histories = Histories()
        self._logs = logs
        self._wait = wait
        self._positions = [0] + [-1] * num_slots
        self._collected_s = 0.0
        self.carriers: dict[str, Carrier] = {}

    def launch(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Queue a step: page moves and copies, one forward pass. What it samples is sampled by
        `sample`.

        A plan made ahead takes tokens from the step `before`, which may still be running.
        """
        launched_s = perf_counter()
        self._write_down(plan)
        self._note_writes(plan)
        self._histories.follow(plan)
        self._copy(plan)
        for sequence in plan.sequences:
            copy = sequence.page_copy
            if copy is not None:
                self.pools.copy_page(copy.source, copy.target, copy.num_tokens)
        flight = self.executor.launch(plan, before)
        flight.accept = self._accept
        flight.launched_s = launched_s  # an executor may return only once it is done
        return flight

    def copy(self, plan: StepPlan) -> None:
        """Queue what a plan that computes nothing copies."""
        self._write_down(plan)
        self._copy(plan)

    def _copy(self, plan: StepPlan) -> None:
        """Queue what a plan copies before anything is computed: moves, what leaves between them,
        then what comes, unless somebody else brings it.
        """
        num_moved = 0
        for num_moves, stores in groupby(plan.stores, attrgetter("num_moves")):
            self.pools.move_pages(plan.moves[num_moved:num_moves])
            num_moved = max(num_moved, num_moves)
            self.carriers["tiers"].store(list(stores))
        self.pools.move_pages(plan.moves[num_moved:])
        for load in plan.loads:
            if load.source in self.carriers:
                self.carriers[load.source].load(load)

    def fence(self) -> Callable[[], bool]:
        """Returns what tells, at any later time, whether all that is queued by now is done."""
        if self.pools.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query

    def filled(self, slot: int, position: int) -> None:
        """Note that a slot holds so many tokens, which somebody else has computed."""
        if slot != ZERO_SLOT:
            self._positions[slot] = position

    def sample(self, flight: Flight, sampling: StepSampling) -> None:
        """Queue the sampling of a step's tokens: with a row for each request, and for one with
        drafts one more behind each of them."""
        assert flight.numbers == [row.number for row in sampling.rows], "a row for who samples"
        if flight.numbers:
            self._write_down(sampling)
            rows = [self._row(row) for row in sampling.rows]
            self.executor.sample(flight, rows)
            if sampling.num_drafts:
                self.executor.draft(flight, rows, sampling.num_drafts)

    def collect(self, flight: Flight) -> RunnerOutput:
        """Wait for a step's tokens; as `wait` does, if a device is to be waited for."""
        if self._wait is not None and flight.choice is not None:
            event = flight.choice.is_copied
            if event is not None:
                self._wait(event)
        sampled = flight.read()
        tokens = {number: [one.token_id for one in run] for number, run in sampled.items()}
        result = StepResult(
            tokens=tokens,
            written=_writes(flight.plan),
            seconds=self._seconds_since(flight.launched_s),
        )
        self._write_down(result)
        self._histories.add(flight.plan, tokens)
        return RunnerOutput(
            result=result,
            sampled=sampled,
            read_drafts=flight.read_drafts,
            prompt_scores=flight.prompt_scores,
        )

    def _seconds_since(self, launched_s: float) -> float:
        """Time that a step took, up to now, behind the one before it."""
        began_s, self._collected_s = max(launched_s, self._collected_s), perf_counter()
        return self._collected_s - began_s

    def elapsed_s(self, flight: Flight) -> float:
        """How long the device has been at a step, if it is the one behind the last collected."""
        return perf_counter() - max(flight.queued_s, self._collected_s)

    def roll_back(self) -> None:
        """Note that the steps in flight were taken back: nobody collects them."""
        self._write_down(Rollback())

    def release(self) -> None:
        """Return the pools' memory, as far as they can; nothing in them is used any more."""
        self._write_down(PoolRelease())
        self.pools.release()

    def _write_down(self, record: Record) -> None:
        for log in self._logs:
            log.write(record)

    def _row(self, plan: SamplingPlan) -> SamplingRow:
        tokens = self._histories.of(plan.number)
        num_known = plan.num_prompt_tokens + plan.index - plan.num_ahead
        if tokens is None:
            tokens = range(num_known)
        elif plan.num_drafts:
            tokens = tokens[:num_known]
        assert len(tokens) == num_known, "H2: a history is as long as the plan says"
        return SamplingRow(
            params=plan.params,
            seed=plan.seed,
            tokens=tokens,
            num_prompt_tokens=plan.num_prompt_tokens,
            suppressed_ids=plan.suppressed_ids,
            mask=None if plan.mask is None else np.frombuffer(plan.mask, np.int32),
            num_ahead=plan.num_ahead,
        )

    def _note_writes(self, plan: StepPlan) -> None:
        """Refuses a plan that reads another state than it says."""
        for sequence in plan.sequences:
            if sequence.slot_out == ZERO_SLOT:
                continue  # its states lie beside its pages
            held, begin = self._positions[sequence.slot_in], sequence.start - sequence.fold
            assert held == begin, (
                f"S4: slot {sequence.slot_in} holds {held} tokens, the plan reads {begin}"
            )
        for slot, position in _writes(plan).items():
            self._positions[slot] = position


def _writes(plan: StepPlan) -> dict[int, int]:
    """Slot -> tokens that its contents have consumed once the plan has run."""
    written = {}
    for sequence in plan.sequences:
        if sequence.slot_out != ZERO_SLOT:
            written[sequence.slot_out] = sequence.state_end
        for export in sequence.exports:
            written[export.slot] = export.position
    return written
