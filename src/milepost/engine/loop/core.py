"""The step loop: requests in, outputs out, one `step` at a time.

Connects new request groups (`group`), the steps that the scheduler plans and the runner runs
(`pipeline`), the running completions (`completions`) and memory outside the device (`off_device`).
Single-threaded; the caller runs `step` while `has_work`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.engine.assembly import EngineParts, build
from milepost.engine.constraints import CompiledForm
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.completions import RunningCompletions
from milepost.engine.loop.failure import FailureLatch
from milepost.engine.loop.group import Intake, RequestGroup
from milepost.engine.loop.pipeline import StepPipeline
from milepost.engine.loop.pixels import PixelStore
from milepost.engine.loop.tiering import close_off_device, open_off_device
from milepost.engine.loop.trace_recording import TraceRecorder
from milepost.engine.metrics import Metric, collect
from milepost.engine.prompts import Prompt
from milepost.engine.text import TokenTexts
from milepost.engine.validation import validate
from milepost.errors import QueueWaitError
from milepost.models.room import collect_memory
from milepost.sampling_params import SamplingParams
from milepost.scheduler.canonical import Canonical
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import FinishReason

AWAIT_S = 0.005
"""Seconds to wait for a copy, while all requests are loading, before polling for other arrivals."""


class Engine:
    """One model with its cache. Raises what `build` raises."""

    def __init__(self, config: EngineConfig, parts: EngineParts | None = None) -> None:
        self.config = config
        parts = parts if parts is not None else build(config)
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.tokenizer: PreTrainedTokenizerBase | None = parts.tokenizer
        self.sampling_defaults = parts.sampling_defaults
        self.facts, self.images, self.limits = parts.facts, parts.images, parts.limits
        texts = TokenTexts(self.tokenizer) if self.tokenizer is not None else None
        self._intake = Intake(config, parts, texts)
        counts_are_kept = parts.runner.executor.keeps_counts
        self._completions = RunningCompletions(
            self.scheduler, texts, counts_are_kept=counts_are_kept
        )
        self._team = parts.team
        self.off_device = open_off_device(config, parts, self._enter)
        self._trace = TraceRecorder(config.record_trace) if config.record_trace else None
        self._canonical = Canonical(self.scheduler)
        self._latch = FailureLatch(parts.team)
        self._pixels = PixelStore()
        self.pipeline = StepPipeline(
            config, parts, self._completions, self.off_device, self._latch, self._pixels
        )
        self._is_stuck = self._is_closed = False

    # --- what there is to do ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return self.scheduler.has_work or any(part.has_work for part in self.off_device)

    @property
    def awaits_others(self) -> bool:
        """Whether there is nothing to do until a waker becomes readable, or a request is added or
        ended."""
        return self._is_stuck and self.has_work

    @property
    def spare_s(self) -> float:
        """Seconds for which `step` need not be called: see `StepPipeline.spare_s`."""
        return self.pipeline.spare_s

    @property
    def rest_s(self) -> float | None:
        """Seconds until `do_idle_work` is due again if nothing else happens; None for never."""
        rests = [part.rest_s for part in self.off_device if part.rest_s is not None]
        return min(rests, default=None)

    @property
    def wakers(self) -> list[socket.socket]:
        """Sockets that are readable once `handle_wakers` has something to do."""
        wakers = [part.waker for part in self.off_device if part.waker is not None]
        return wakers if self._team is None else [*wakers, self._team.alarm]

    # --- what is asked of it ----------------------------------------------------------------------

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Validates a request and compiles its form. Raises InvalidRequestError, and
        EngineDeadError if a step has failed."""
        self._latch.check()
        validate(prompt, params, self.limits)
        self._intake.prepare(params)

    def prepare(self, params: SamplingParams) -> CompiledForm | None:
        """Does the slow work before `queue`, which then finds it done. Returns the compiled form of
        the completions, None without one. May be called from another thread. Raises
        InvalidRequestError for a form that cannot be enforced."""
        return self._intake.prepare(params)

    def add(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> RequestGroup:
        """Validates a prompt and queues it. Raises InvalidRequestError, and then nothing has
        changed."""
        self._latch.check()
        validate(prompt, params, self.limits)
        return self.queue(prompt, params, priority=priority)

    def queue(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int | None = None,
        priority: int = 0,
        form: CompiledForm | None = None,
    ) -> RequestGroup:
        """Queues a prompt that has passed `validate`, under the client's number or the next one;
        `form` is what `prepare` returned for it, if it was called before. If it is interrupted,
        nothing stays queued. Raises InvalidRequestError for a form that cannot be enforced, and
        QueueWaitError if the prompt would wait for too long."""
        self._latch.check()
        form = form or self._intake.form_of(params)
        group = self._intake.group(prompt, params, number=number, priority=priority, form=form)
        self.scheduler.check_wait(group.completions[0].request)
        self._is_stuck = False
        self._pixels.hold(group)
        try:
            for completion in group.completions:
                if not any(part.hold(group, completion) for part in self.off_device):
                    self._enter(group, completion)
                    for part in self.off_device:
                        part.note_queued(group, completion)
            if self._trace is not None:
                self._trace.begin(group)
        except BaseException:
            self.abort(group)  # nobody else knows of it yet
            raise
        return group

    def _enter(self, group: RequestGroup, completion: Completion) -> None:
        """Adds a completion's request to the scheduler."""
        self._canonical.give_way()
        self.scheduler.add(completion.request)
        self._completions.add(group, completion)

    def end_late(self) -> list[tuple[RequestGroup, QueueWaitError]]:
        """Ends the groups that `RunningCompletions.take_late` returns, and returns them."""
        late = self._completions.take_late()
        for group, _ in late:
            self.abort(group)
        return late

    def abort(self, group: RequestGroup) -> None:
        """Ends a group's unfinished completions. What they hold is freed once no step or load
        uses it."""
        self._forget(group)
        for completion in [one for part in self.off_device for one in part.drop(group)]:
            completion.request.finish_reason = FinishReason.ABORT
        self._is_stuck = False
        if not self._latch.is_alive:
            return
        for completion in group.completions:
            if self.scheduler.finish(completion.request, FinishReason.ABORT):
                completion.text.flush()
        self.pipeline.settle()
        self.scheduler.outside.tell()

    def _forget(self, group: RequestGroup) -> None:
        self._pixels.let_go(group)
        if self._trace is not None:
            self._trace.end(group)
        for request in self._completions.forget(group):
            if self.pipeline.speculation is not None:
                self.pipeline.speculation.forget(request)

    # --- the step ---------------------------------------------------------------------------------

    def step(self) -> list[RequestGroup]:
        """Runs one step. Returns the groups that have new tokens, by number.

        Raises EngineDeadError if the step fails: the state of its requests is lost, and so is the
        engine. One that is interrupted while the model runs is rolled back: its requests are
        computed again by later steps.
        """
        self._latch.check()
        self.poll()
        step = self.pipeline.current()
        if step is None:
            self._is_stuck = not self._await_copies()
            self.scheduler.outside.tell()
            return []
        output = self.pipeline.collect(step)
        with self._latch.fatal(BaseException):
            groups = self._completions.take(step.plan, output)
            self.pipeline.speculate(step.plan, output)
        finished = [group for group in groups if group.is_finished]
        try:
            self.pipeline.advance()
        finally:  # these groups are not reported again
            for group in finished:
                self._forget(group)
        self.pipeline.settle()
        for group in finished:
            for part in self.off_device:
                part.note_finished(group)
        self.scheduler.outside.tell()
        return groups

    # --- outside the device -----------------------------------------------------------------------

    def poll(self) -> None:
        """Handles the copies and messages that have arrived from outside the device."""
        for part in self.off_device:
            with self._latch.fatal(BaseException):
                part.poll()
        self._is_stuck = False

    def handle_wakers(self, ready: Sequence[socket.socket]) -> None:
        """Handles these readable wakers. Raises EngineDeadError if another rank is lost."""
        if self._team is not None and self._team.alarm in ready:
            with self._latch.fatal(BaseException):
                raise self._team.failure()
        self.poll()

    def _await_copies(self) -> bool:
        """Waits a little for loads if nothing can be computed before they arrive. Returns False if
        none arrives by itself."""
        with self.pipeline.rolling_back(StepPlan(sequences=())):
            return any(part.wait(AWAIT_S) for part in self.off_device)

    def do_idle_work(self) -> bool:
        """Copies and canonicalises while nothing runs. Returns whether more will be due soon."""
        has_more = [not self.has_work and part.do_idle_work() for part in self.off_device]
        return (not self.has_work and self._canonical.begin()) or any(has_more)

    def _end_idle_work(self) -> None:
        self._canonical.give_way()
        self.pipeline.settle()

    def flush(self) -> None:
        """Waits until all stores are done, if nothing runs."""
        if not self._completions and self._latch.is_alive:
            for part in self.off_device:
                part.flush()

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Drops everything cached in memory, and with `reset_connector` also on disk. Returns False
        while requests are running."""
        self._end_idle_work()
        self.poll()
        is_done = self.scheduler.cache.reset()
        if is_done:
            for part in self.off_device:
                part.reset(with_files=reset_connector)
        self.scheduler.outside.tell()
        return is_done

    def release_cache(self) -> bool:
        """Drops everything cached and returns its memory to the system, as far as `Pools.release`
        can. Returns False while requests are running or waiting."""
        self._end_idle_work()
        is_done = not self.has_work and self.reset_prefix_cache()
        if is_done:
            self.runner.release()
        return is_done

    def get_metrics(self) -> list[Metric]:
        """Returns the current values of all counters and gauges."""
        others = (metric for part in self.off_device for metric in part.metrics())
        return [*collect(self.scheduler), *others]

    def close(self) -> None:
        """Ends what runs, writes what outlives the process, and releases addresses and memory."""
        if self._is_closed:
            return
        self._is_closed = True
        for group in self._completions.groups():
            self.abort(group)
        close_off_device(self.off_device, is_whole=self._latch.is_alive)
        if self._trace is not None:
            self._trace.close()
        device, self.off_device = self.runner.pools.device, ()
        del self.runner, self.pipeline  # the caller may keep the engine, but not weights and pools
        collect_memory(device)
        if self._team is not None:
            self._team.close()
