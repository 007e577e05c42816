"""Executes step plans on the model. The only part that knows both plans and tensors.

Besides the pools, it keeps the position up to which each slot's state has consumed tokens, and
refuses to read a slot whose position differs from the plan's. All inputs are data that could come
from another process or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from milepost.cache.memory import ZERO_SLOT
from milepost.runner.choice import PromptScores, SampledToken
from milepost.runner.histories import Histories
from milepost.runner.in_flight import Accept, InFlightStep, accept_equal
from milepost.runner.pictures import EncodedPictures, PicturePixels
from milepost.runner.pools import Pools
from milepost.runner.recording import Log, PictureRecord, PoolRelease, Record, Rollback
from milepost.runner.sampling import SamplingRow
from milepost.scheduler.plans import Load, SamplingPlan, StepPlan, StepResult, StepSampling, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """A step's result for the scheduler, and the sampled tokens with their requested
    log-probabilities."""

    result: StepResult
    sampled: Mapping[int, Sequence[SampledToken]]
    """Sampled tokens by request number."""
    read_drafts: Callable[[], Mapping[int, Sequence[int]]] = dict
    """Waits for the drafts after these tokens, by request number: the device is still computing
    them."""
    prompt_scores: Sequence[PromptScores] = ()


class Executor(Protocol):
    """Computes a step; launches may return before the device is done."""

    keeps_counts: bool
    """Whether it counts the tokens of answers itself, so that penalties need not wait for tokens to
    be read."""
    pictures: EncodedPictures | None
    """Pictures for the model's tower, if it has one."""

    def launch(self, plan: StepPlan, before: InFlightStep | None) -> InFlightStep:
        """Queues a forward pass after the work that is queued already. A sequence that is ahead
        takes its token from the flight `before`."""
        ...

    def sample(self, flight: InFlightStep, rows: Sequence[SamplingRow]) -> None:
        """Queues the sampling of a flight's tokens, with a row for each of its requests, in order.
        Call it once, before the next forward pass."""
        ...

    def draft(self, flight: InFlightStep, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Queues up to `num_drafts` drafts of the model's head for each request of a flight. Call
        it right after `sample`, with its rows."""
        ...


class PoolTransfers(Protocol):
    """Copies between the pools and another place. Calls may return before anything is copied;
    copies keep their order among the device's launches."""

    def store(self, stores: Sequence[Store]) -> None:
        """Copies out what the pools hold at this point."""
        ...

    def load(self, load: Load) -> None:
        """Fills pages and slots. No later launch reads them until they are reported as loaded."""
        ...


class Runner:
    """Runs steps over `pools` with an executor, one at a time or one ahead. `transfers` maps the
    name of a source outside the device to the part that makes its copies."""

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
        self.transfers: dict[str, PoolTransfers] = {}

    def launch(self, plan: StepPlan, before: InFlightStep | None = None) -> InFlightStep:
        """Queues a step: page moves and copies, then one forward pass. `sample` queues its
        sampling. A plan made ahead takes tokens from the step `before`, which may still be running.
        """
        launched_s = perf_counter()
        self._write_down(plan)
        self._note_writes(plan)
        self._histories.follow(plan)
        self._copy(plan)
        if self.executor.pictures is not None:
            self.executor.pictures.follow(plan)
        for sequence in plan.sequences:
            copy = sequence.page_copy
            if copy is not None:
                self.pools.copy_page(copy.source, copy.target, copy.num_tokens)
            copy = sequence.window_copy
            if copy is not None:
                self.pools.copy_window(copy.source, copy.target, copy.num_tokens)
        flight = self.executor.launch(plan, before)
        flight.accept = self._accept
        flight.launched_s = launched_s  # an executor may return only once the step is done
        return flight

    def take_pixels(self, record: PictureRecord) -> None:
        """Keeps the pixels of a picture until a plan encodes it."""
        self._write_down(record)
        pictures = self.executor.pictures
        assert pictures is not None, "only a model with a tower is given pictures"
        rows = np.frombuffer(record.rows, np.uint8).reshape(prod(record.grid), -1)
        pictures.take(record.identity, PicturePixels(rows=rows, grid=record.grid))

    def copy(self, plan: StepPlan) -> None:
        """Queues the copies, and encodes the pictures, of a plan that computes no tokens."""
        self._write_down(plan)
        self._copy(plan)
        if self.executor.pictures is not None:
            self.executor.pictures.follow(plan)

    def _copy(self, plan: StepPlan) -> None:
        """Queues the copies that precede a plan's computation: moves with the stores between them,
        then the loads, except those that another part makes."""
        num_moved = 0
        for num_moves, stores in groupby(plan.stores, attrgetter("num_moves")):
            self.pools.move_pages(plan.moves[num_moved:num_moves])
            num_moved = max(num_moved, num_moves)
            self.transfers["tiers"].store(list(stores))
        self.pools.move_pages(plan.moves[num_moved:])
        for load in plan.loads:
            if load.source in self.transfers:
                self.transfers[load.source].load(load)

    def fence(self) -> Callable[[], bool]:
        """Returns a function that tells, at any later time, whether all work queued so far is
        done."""
        if self.pools.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query

    def filled(self, slot: int, position: int) -> None:
        """Records that a slot holds the state after `position` tokens, computed elsewhere."""
        if slot != ZERO_SLOT:
            self._positions[slot] = position

    def sample(self, flight: InFlightStep, sampling: StepSampling) -> None:
        """Queues the sampling of a step's tokens, with a row for each request and one more for each
        of its drafts."""
        assert flight.numbers == [row.number for row in sampling.rows], "a row for who samples"
        if flight.numbers:
            self._write_down(sampling)
            rows = [self._row(row) for row in sampling.rows]
            self.executor.sample(flight, rows)
            if sampling.num_drafts:
                self.executor.draft(flight, rows, sampling.num_drafts)

    def collect(self, flight: InFlightStep) -> RunnerOutput:
        """Waits for a step's tokens, through `wait` if a device has to be waited for."""
        if self._wait is not None and flight.choice is not None:
            event = flight.choice.is_copied
            if event is not None:
                self._wait(event)
        sampled = flight.read()
        tokens = {number: [one.token_id for one in run] for number, run in sampled.items()}
        result = StepResult(
            tokens=tokens,
            written=flight.plan.written,
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
        """Returns a step's duration up to now, counted from its launch or the end of the previous
        step."""
        began_s, self._collected_s = max(launched_s, self._collected_s), perf_counter()
        return self._collected_s - began_s

    def elapsed_s(self, flight: InFlightStep) -> float:
        """Returns how long the device has been running a step that follows the last collected
        one."""
        return perf_counter() - max(flight.queued_s, self._collected_s)

    def roll_back(self) -> None:
        """Records that the steps in flight were rolled back: they will not be collected."""
        self._write_down(Rollback())

    def release(self) -> None:
        """Returns the pools' memory to the system as far as possible. Their contents must no longer
        be needed."""
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
        """Records the positions of the states that a plan writes. Refuses a plan that reads a state
        at another position than it says."""
        for sequence in plan.sequences:
            if sequence.slot_out == ZERO_SLOT:
                continue  # its states are stored with its pages
            held, begin = self._positions[sequence.slot_in], sequence.start - sequence.fold
            assert held == begin, (
                f"S4: slot {sequence.slot_in} holds {held} tokens, the plan reads {begin}"
            )
        for slot, position in plan.written.items():
            self._positions[slot] = position
