"""The step loop: requests in, outputs out, one `step` at a time.

Connects the checks of new requests (`intake`), the steps that the scheduler plans and the runner
runs (`flights`), the running answers (`answers`) and what is kept or exchanged outside (`tiering`,
`exchange`). Single-threaded; the caller runs `step` while `has_work`.
"""

from __future__ import annotations

import socket

from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.disaggregation.params import Remote
from milepost.engine.assembly import EngineParts, build
from milepost.engine.constraints import CompiledForm
from milepost.engine.loop.completions import RunningCompletions
from milepost.engine.loop.exchange import Exchange
from milepost.engine.loop.failure import FailureLatch
from milepost.engine.loop.intake import Intake
from milepost.engine.loop.pipeline import StepPipeline
from milepost.engine.loop.requests import Completion, RequestGroup
from milepost.engine.loop.trace_recording import TraceRecorder
from milepost.engine.metrics import Metric, collect
from milepost.engine.prompts import Prompt
from milepost.engine.text import TokenTexts
from milepost.errors import QueueWaitError
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import FinishReason

AWAIT_S = 0.005
"""How long to wait for a copy before other arrivals are polled, while all requests load."""


class Engine:
    """One model with its cache. Raises what `setup.build` raises."""

    def __init__(self, config: EngineConfig, parts: EngineParts | None = None) -> None:
        self.config = config
        parts = parts if parts is not None else build(config)
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.tokenizer: PreTrainedTokenizerBase | None = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self.sampling_defaults = parts.sampling_defaults
        self.facts = parts.facts
        texts = TokenTexts(self.tokenizer) if self.tokenizer is not None else None
        self._intake = Intake(config, parts, texts)
        counts_are_kept = self.runner.executor.keeps_counts
        self._answers = RunningCompletions(self.scheduler, texts, counts_are_kept=counts_are_kept)
        ask = None if parts.team is None else parts.team.ask
        self._exchange = Exchange(config, self.scheduler, self.runner, parts.access, ask)
        self.connector, self.bell = self._exchange.connector, self._exchange.bell
        self._tiering = parts.tiering
        self._trace = TraceRecorder(config.record_trace) if config.record_trace else None
        self._team = parts.team
        self._fate = FailureLatch(parts.team)
        self.flights = StepPipeline(config, parts, self._answers, self._exchange, self._fate)
        self._is_stuck = False

    # --- what there is to do ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._exchange.is_looking

    @property
    def awaits_others(self) -> bool:
        """Whether nothing can be done until the bell rings, or a request is added or ended."""
        return self._is_stuck and self.has_work

    @property
    def spare_s(self) -> float:
        """Seconds for which `step` need not be called: what is added by then is still in the step
        that it plans ahead, and the device has work until then."""
        return self.flights.spare_s

    # --- what is asked of it ----------------------------------------------------------------------

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise what `add` would: InvalidRequestError, or EngineDeadError. Compiles the form."""
        self._check(prompt, params)
        self._intake.form_of(params)

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        self._fate.check()
        self._intake.check(prompt, params)

    def prepare(self, params: SamplingParams) -> CompiledForm | None:
        """Do the slow work before `add`, which then finds it done. Returns the compiled form of the
        answers, None without one. May be called from another thread. Raises InvalidRequestError
        for a form that cannot be enforced."""
        return self._intake.prepare(params)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        form: CompiledForm | None = None,
    ) -> RequestGroup:
        """Queue a prompt; `form` is what `prepare` made for it, if it was called before.

        Raises InvalidRequestError, and QueueWaitError if it would wait for too long; then nothing
        has changed.
        """
        self._check(prompt, params)
        return self.queue(prompt, params, priority=priority, form=form)

    def queue(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        form: CompiledForm | None = None,
    ) -> RequestGroup:
        """Queue a prompt that has passed `check`; if it is interrupted, nothing stays queued."""
        form = form or self._intake.form_of(params)
        job = self._intake.job(prompt, params, priority, form)
        remote = self._intake.remote(prompt)
        self.scheduler.check_wait(job.answers[0].request)
        self._is_stuck = False
        try:
            for answer in job.answers:
                if not self._exchange.look(job, answer):
                    self._enter(job, answer, None if answer.index else remote)
            if self._trace is not None:
                self._trace.begin(job)
        except BaseException:
            self.abort(job)  # nobody else knows of it yet
            raise
        return job

    def _enter(self, job: RequestGroup, answer: Completion, remote: Remote | None) -> None:
        """Have the scheduler serve a request, which may fetch something from elsewhere."""
        self.scheduler.add(answer.request)
        self._exchange.want(answer, remote)
        self._answers.add(job, answer)

    def abort(self, job: RequestGroup) -> None:
        """End a job's unfinished answers; what they hold is freed at once."""
        self._forget(job)
        for answer in self._exchange.drop(job):
            answer.request.finish_reason = FinishReason.ABORT
        self._is_stuck = False
        if not self._fate.is_alive:
            return
        for answer in job.answers:
            if self.scheduler.finish(answer.request, FinishReason.ABORT):
                answer.text.flush()
        self.flights.settle()
        self._publish()

    def end_late(self) -> list[tuple[RequestGroup, QueueWaitError]]:
        """End the groups that have waited for too long, none of whose answers has begun; returns
        them, and what to tell their clients."""
        ended: dict[RequestGroup, QueueWaitError] = {}
        for request, error in self.scheduler.take_late():
            if request.finish_reason is None:
                group = self._answers.group_of(request)
                if all(answer.request.report is None for answer in group.answers):
                    self.abort(group)
                    ended[group] = error
        return list(ended.items())

    def _forget(self, job: RequestGroup) -> None:
        if self._trace is not None:
            self._trace.end(job)
        for request in self._answers.forget(job):
            if self.flights.speculation is not None:
                self.flights.speculation.forget(request)

    # --- the step ---------------------------------------------------------------------------------

    def step(self) -> list[RequestGroup]:
        """Run one step; returns the jobs that have new tokens, in the order of being added.

        Raises EngineDeadError if the step fails: the state of its requests is lost, and so is the
        engine. One that is interrupted while the model runs is rolled back: its requests are
        computed again by later steps.
        """
        self._fate.check()
        self.poll()
        flight = self.flights.current()
        if flight is None:
            self._is_stuck = not self._await_copies()
            self._publish()
            return []
        output = self.flights.collect(flight)
        with self._fate.fatal(BaseException):
            jobs = self._answers.take(flight.plan, output)
            self.flights.speculate(flight.plan, output)
        finished = [job for job in jobs if job.is_finished]
        try:
            self.flights.advance()
        finally:  # nobody is told of these jobs again
            for job in finished:
                self._forget(job)
        self.flights.settle()
        for job in finished:
            self._exchange.lend(job)
        self._publish()
        return jobs

    # --- outside the device -----------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what tiers and other engines have delivered, and free what those have read."""
        if self._tiering is not None:
            with self._fate.fatal(BaseException):
                self._tiering.poll()
        if self.connector is not None:
            with self._fate.fatal(BaseException):
                for found in self._exchange.found():
                    self._enter(*found)
            self._is_stuck = False

    def _publish(self) -> None:
        """Pass the cache's events on to all listeners."""
        self.scheduler.outside.tell()

    def _await_copies(self) -> bool:
        """Nothing can be computed before a load arrives: if it is a tier's, wait a little."""
        if self._tiering is None or not self._tiering.is_busy:
            return False
        with self.flights.rolling_back(StepPlan(sequences=())):
            self._tiering.wait(AWAIT_S)
        return True

    def do_idle_work(self) -> bool:
        """Do what is due while nothing runs; returns whether there will be more soon."""
        return self._tiering is not None and not self.has_work and self._tiering.do_idle_work()

    @property
    def rest_s(self) -> float | None:
        """Seconds until `do_idle_work` is due again if nothing else happens; None: never."""
        return None if self._tiering is None else self._tiering.copier.rest_s

    def flush(self) -> None:
        """Wait until all copies to tiers are done, if nothing runs."""
        if self._tiering is not None and not self._answers and self._fate.is_alive:
            self._tiering.flush()

    # --- other ranks ------------------------------------------------------------------------------

    @property
    def alarm(self) -> socket.socket | None:
        """Becomes readable once another rank is lost; None without other ranks."""
        return self._team.alarm if self._team is not None else None

    def check_ranks(self) -> None:
        """Raises EngineDeadError: one of them is lost."""
        assert self._team is not None, "only ranks are lost"
        with self._fate.fatal(BaseException):
            raise self._team.failure()

    # --- all of it --------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False while requests are running."""
        self.poll()
        is_done = self.scheduler.cache.reset()
        if is_done and self._tiering is not None:
            self._tiering.reset()
        self._publish()
        return is_done

    def release_cache(self) -> bool:
        """Forget everything cached and return its memory to the system, as far as `Pools.release`
        can; False while requests are running or waiting."""
        is_done = not self.has_work and self.reset_prefix_cache()
        if is_done:
            self.runner.release()
        return is_done

    def get_metrics(self) -> list[Metric]:
        """The current values of all counters and gauges."""
        own = self._tiering.metrics() if self._tiering is not None else []
        return [*collect(self.scheduler), *own, *self._exchange.metrics()]

    def close(self) -> None:
        """Release addresses, which outlast the process, and write what should outlive it."""
        if self._tiering is not None and self._fate.is_alive:
            self._tiering.close()
        if self._trace is not None:
            self._trace.close()
        self._exchange.close()
