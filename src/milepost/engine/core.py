"""The step loop: requests in, outputs out, one `step` at a time.

Joins what comes in (`intake`), the steps that the scheduler plans and the runner runs (`flights`),
the answers that are being made (`answers`) and what is kept or exchanged outside (`tiering`,
`exchange`).
Single-threaded; whoever drives it calls `step` while `has_work`.
"""

from __future__ import annotations

import socket

from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.disaggregation.params import Remote
from milepost.engine.answers import Answers
from milepost.engine.exchange import Exchange
from milepost.engine.fate import Fate
from milepost.engine.flights import Flights
from milepost.engine.grammars import Form
from milepost.engine.intake import Intake
from milepost.engine.metrics import Metric, collect
from milepost.engine.prompts import Prompt
from milepost.engine.requests import Answer, Job
from milepost.engine.setup import EngineParts, build
from milepost.engine.token_texts import TokenTexts
from milepost.engine.trace_recording import TraceRecorder
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import FinishReason

AWAIT_S = 0.005
"""Between two looks at what has arrived otherwise, while all requests load."""


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
        self._answers = Answers(self.scheduler, texts, counts_are_kept=counts_are_kept)
        ask = None if parts.team is None else parts.team.ask
        self._exchange = Exchange(config, self.scheduler, self.runner, parts.access, ask)
        self.connector, self.bell = self._exchange.connector, self._exchange.bell
        self._tiering = parts.tiering
        self._trace = TraceRecorder(config.record_trace) if config.record_trace else None
        self._team = parts.team
        self._fate = Fate(parts.team)
        self.flights = Flights(config, parts, self._answers, self._exchange, self._fate)
        self._is_stuck = False

    # --- what there is to do ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._exchange.is_looking

    @property
    def awaits_others(self) -> bool:
        """Whether nothing can be done before the bell has rung, or somebody adds or ends a
        request."""
        return self._is_stuck and self.has_work

    @property
    def spare_s(self) -> float:
        """Seconds for which `step` need not be called: what is added by then is in the step that it
        plans ahead, and the device has work until then."""
        return self.flights.spare_s

    # --- what is asked of it ----------------------------------------------------------------------

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise what `add` would: InvalidRequestError, or EngineDeadError. Compiles the form."""
        self._check(prompt, params)
        self._intake.form_of(params)

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        self._fate.check()
        self._intake.check(prompt, params)

    def prepare(self, params: SamplingParams) -> Form | None:
        """Make what takes long before `add`, which then finds it; returns the compiled form of the
        answers, None for any. May be called from another thread. Raises InvalidRequestError for
        what cannot be kept to."""
        return self._intake.prepare(params)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        form: Form | None = None,
    ) -> Job:
        """Queue a prompt; `form` is what `prepare` made for it, if it was called before.

        Raises InvalidRequestError, and then nothing has changed.
        """
        self._check(prompt, params)
        return self.queue(prompt, params, priority=priority, form=form)

    def queue(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        form: Form | None = None,
    ) -> Job:
        """Queue a prompt that `check` has let pass."""
        form = form or self._intake.form_of(params)
        job = self._intake.job(prompt, params, priority, form)
        remote = self._intake.remote(prompt)
        self._is_stuck = False
        for answer in job.answers:
            if not self._exchange.look(job, answer):
                self._enter(job, answer, None if answer.index else remote)
        if self._trace is not None:
            self._trace.begin(job)
        return job

    def _enter(self, job: Job, answer: Answer, remote: Remote | None) -> None:
        """Have the scheduler serve a request, which may fetch something from elsewhere."""
        self.scheduler.add(answer.request)
        self._exchange.want(answer, remote)
        self._answers.add(job, answer)

    def abort(self, job: Job) -> None:
        """End a job's answers that are not over; what they hold is free at once."""
        self._forget(job)
        for answer in self._exchange.drop(job):
            answer.request.finish_reason = FinishReason.ABORT
        self._is_stuck = False
        if not self._fate.is_alive:
            return
        for answer in job.answers:
            self.scheduler.finish(answer.request, FinishReason.ABORT)
            answer.text.flush()
        self.flights.settle()
        self._tell()

    def _forget(self, job: Job) -> None:
        if self._trace is not None:
            self._trace.end(job)
        for request in self._answers.forget(job):
            if self.flights.speculation is not None:
                self.flights.speculation.forget(request)

    # --- the step ---------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """Run one step; returns the jobs that have new tokens, in the order of being added.

        Raises EngineDeadError if the step fails: the state of its requests is lost, and so is the
        engine. One that is interrupted while the model runs is taken back: its requests are
        computed again by the steps that follow.
        """
        self._fate.check()
        self.hear()
        flight = self.flights.begun()
        if flight is None:
            self._is_stuck = not self._await_copies()
            self._tell()
            return []
        output = self.flights.collect(flight)
        with self._fate.fatal(BaseException):
            jobs = self._answers.take(flight.plan, output)
            self.flights.speculate(flight.plan, output)
        self.flights.go_on()
        finished = [job for job in jobs if job.is_finished]
        for job in finished:
            self._forget(job)
        self.flights.settle()
        for job in finished:
            self._exchange.lend(job)
        self._tell()
        return jobs

    # --- outside the device -----------------------------------------------------------------------

    def hear(self) -> None:
        """Take in what has come from tiers and other engines, and give back what those have
        read."""
        if self._tiering is not None:
            with self._fate.fatal(BaseException):
                self._tiering.poll()
        if self.connector is not None:
            with self._fate.fatal(BaseException):
                for found in self._exchange.found():
                    self._enter(*found)
            self._is_stuck = False

    def _tell(self) -> None:
        """Tell whoever listens what has come and gone."""
        self.scheduler.outside.tell()

    def _await_copies(self) -> bool:
        """Nothing can be computed before something comes: if that is from a tier, wait a little."""
        if self._tiering is None or not self._tiering.is_busy:
            return False
        with self.flights.rolling_back(StepPlan(sequences=())):
            self._tiering.wait(AWAIT_S)
        return True

    def tend(self) -> bool:
        """Do what is due while nothing runs; whether there will be more soon."""
        return self._tiering is not None and not self.has_work and self._tiering.tend()

    @property
    def rest_s(self) -> float | None:
        """After so long `tend` has something to do again, though nothing comes; None: never."""
        return None if self._tiering is None else self._tiering.copier.rest_s

    def flush(self) -> None:
        """Wait until what is kept outside the device is there, if nothing runs."""
        if self._tiering is not None and not self._answers and self._fate.is_alive:
            self._tiering.flush()

    # --- other ranks ------------------------------------------------------------------------------

    @property
    def alarm(self) -> socket.socket | None:
        """Can be read once another rank is lost; None without any."""
        return self._team.alarm if self._team is not None else None

    def check_ranks(self) -> None:
        """Raises EngineDeadError: one of them is lost."""
        assert self._team is not None, "only ranks are lost"
        with self._fate.fatal(BaseException):
            raise self._team.failure()

    # --- all of it --------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False while requests are running."""
        self.hear()
        is_done = self.scheduler.cache.reset()
        if is_done and self._tiering is not None:
            self._tiering.reset()
        self._tell()
        return is_done

    def release_cache(self) -> bool:
        """Forget everything cached and return its memory to the system, as far as `Pools.release`
        can; False while requests are running or waiting."""
        is_done = not self.has_work and self.reset_prefix_cache()
        if is_done:
            self.runner.release()
        return is_done

    def get_metrics(self) -> list[Metric]:
        """All counters and gauges of this moment."""
        own = self._tiering.metrics() if self._tiering is not None else []
        return [*collect(self.scheduler), *own, *self._exchange.metrics()]

    def close(self) -> None:
        """Give back what the process does not give back by ending: addresses; and bring down what
        is to outlive it.
        """
        if self._tiering is not None and self._fate.is_alive:
            self._tiering.close()
        if self._trace is not None:
            self._trace.close()
        self._exchange.close()
