"""The step loop: requests in, outputs out, one `step` at a time.

Joins the pure scheduler with the runner; what comes in (`intake`), the answers that are being made
(`answers`) and what is kept or exchanged outside (`tiering`, `exchange`) are others' affairs.
Single-threaded; whoever drives it calls `step` while `has_work`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.disaggregation.params import Remote
from milepost.engine.answers import Answers
from milepost.engine.exchange import Exchange
from milepost.engine.fate import Fate
from milepost.engine.grammars import Form
from milepost.engine.intake import Intake
from milepost.engine.metrics import Metric, collect
from milepost.engine.pace import Pace
from milepost.engine.prompts import Prompt
from milepost.engine.requests import Answer, Job
from milepost.engine.setup import EngineParts, build
from milepost.engine.token_texts import TokenTexts
from milepost.engine.trace_recording import TraceRecorder
from milepost.errors import EngineDeadError
from milepost.runner.runner import Flight, RunnerOutput
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import StepPlan, StepSampling
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
        self.speculation = parts.speculation
        self._team = parts.team
        self._fate = Fate(parts.team)
        self._runs_ahead = parts.runs_ahead
        self._pace = Pace()
        self._under_way: Flight | None = None
        self._is_stuck = False
        self._last_end_s: float | None = None
        """When the last step was taken, if work was left then."""

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
        flight = self._under_way
        if flight is None or not flight.is_timed or _is_mostly_judging(flight.plan):
            return 0.0
        running = self.scheduler.running
        if len(running) + len(self.scheduler.waiting) >= self.config.max_num_seqs:
            return 0.0  # what comes has to wait anyhow
        will_prefill = bool(self.scheduler.waiting) or any(r.num_left > 1 for r in running)
        elapsed_s = self.runner.elapsed_s(flight)
        return self._pace.spare_s(flight.plan, elapsed_s, will_prefill=will_prefill)

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
        self._settle()
        self._tell()

    def _forget(self, job: Job) -> None:
        if self._trace is not None:
            self._trace.end(job)
        for request in self._answers.forget(job):
            if self.speculation is not None:
                self.speculation.forget(request)

    # --- the step ---------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """Run one step; returns the jobs that have new tokens, in the order of being added.

        Raises EngineDeadError if the step fails: the state of its requests is lost, and so is the
        engine. One that is interrupted while the model runs is taken back: its requests are
        computed again by the steps that follow.
        """
        self._fate.check()
        self.hear()
        flight = self._under_way or self._start()
        if flight is None:
            self._is_stuck = not self._await_copies()
            self._tell()
            return []
        output = self._collect(flight)
        with self._fate.fatal(BaseException):
            jobs = self._answers.take(flight.plan, output)
            self._speculate(flight.plan, output)
        self._go_on()
        finished = [job for job in jobs if job.is_finished]
        for job in finished:
            self._forget(job)
        self._settle()
        for job in finished:
            self._exchange.lend(job)
        self._tell()
        return jobs

    def _start(self) -> Flight | None:
        """Plan a step and launch it; None if there is nothing to do."""
        with self._fate.fatal(BaseException):
            plan = self.scheduler.schedule()
            can_wait = bool(self.scheduler.num_loading)
            assert plan.sequences or can_wait or not self.scheduler.has_work, (
                "a step does some of the work"
            )
        if not plan.sequences:
            self._only_copy(plan)
            return None
        with self._rolling_back(plan):
            flight = self.runner.launch(plan)
            self._exchange.fetch(plan.loads, self.runner.mark)
            self._sample(flight, num_ahead=0)
        return flight

    def _collect(self, flight: Flight) -> RunnerOutput:
        """Launch the step behind one that is under way, then wait for that one's tokens."""
        with self._rolling_back(flight.plan):
            self._under_way = self._start_ahead(flight)
            output = self.runner.collect(flight)
            if flight.is_timed:
                self._pace.note_step(flight.plan, flight.device_s)
            if self._tiering is not None:
                self._tiering.note_step(flight.plan, output.result.seconds)
        return output

    def _start_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step behind one that is under way, if it is known without its tokens.

        It samples at once unless it has to know them for that; then it samples when they are taken.
        """
        if not self._runs_ahead or _is_mostly_judging(flight.plan):
            return None
        began_s = perf_counter()
        with self._fate.fatal(BaseException):
            plan = self.scheduler.follow(flight.plan)
        if plan is None or not plan.sequences:
            self._only_copy(plan or StepPlan(sequences=()))
            return None
        ahead = self.runner.launch(plan, before=flight)
        self._exchange.fetch(plan.loads, self.runner.mark)
        if not self._answers.wait_for(1, plan.sequences):
            self._sample(ahead, num_ahead=1)
        self._pace.note_planning(plan, perf_counter() - began_s, is_late=ahead.is_late)
        return ahead

    def _go_on(self) -> None:
        """Now that a step's tokens are known, have the one behind it sample, if it had to know
        them. Where drafts kept that one from being launched ahead, launch it: it runs while what
        was taken is handed on.
        """
        ahead = self._under_way
        if ahead is not None and not ahead.is_sampled:
            with self._rolling_back(ahead.plan):
                self._sample(ahead, num_ahead=0)
        waits = ahead is None and self._runs_ahead and self.speculation is not None
        if waits and self.scheduler.has_work and not self.scheduler.only_folds:
            self._under_way = self._start()

    def _sample(self, flight: Flight, *, num_ahead: int) -> None:
        """Have a launched step sample. Of its sequences that are ahead, so many tokens are not
        known yet."""
        rows = self._answers.choices(flight.plan, num_ahead)
        num_drafts = 0 if self.speculation is None else self.speculation.num_behind(flight.plan)
        self.runner.sample(flight, StepSampling(rows=rows, num_drafts=num_drafts))

    def _speculate(self, plan: StepPlan, output: RunnerOutput) -> None:
        """Take note of what became of drafts, and hand in new ones."""
        if self.speculation is None:
            return
        now_s, last_s = perf_counter(), self._last_end_s
        self._last_end_s = now_s if self.has_work else None
        num_tokens = {number: len(run) for number, run in output.sampled.items()}
        self._answers.note_drafts(plan, num_tokens)
        self.speculation.note(plan, num_tokens, None if last_s is None else now_s - last_s)
        self.speculation.learn(output.read_drafts())
        self.speculation.propose(self._answers.possible)

    def _settle(self) -> None:
        """Where every answer is over, take the outcome of a step that turned out to be for nothing,
        and bring states to the ends of their answers.
        """
        if self.scheduler.has_work and not self.scheduler.only_folds:
            return
        flight, self._under_way = self._under_way, None
        if flight is not None:
            with self._fate.fatal(BaseException):
                self.scheduler.update(flight.plan, self.runner.collect(flight).result)
        if self.scheduler.only_folds:
            last = self._start()
            assert last is not None, "a fold is a step"
            with self._rolling_back(last.plan):
                output = self.runner.collect(last)
            with self._fate.fatal(BaseException):
                self.scheduler.update(last.plan, output.result)

    @contextmanager
    def _rolling_back(self, plan: StepPlan) -> Iterator[None]:
        """An interruption leaves half-written states, so the step and what follows it is taken
        back; a failure is the engine's death.
        """
        with self._fate.fatal(Exception):
            try:
                yield
            except (KeyboardInterrupt, SystemExit):
                self._under_way = None
                if self._fate.is_alive:  # else it was planning that was interrupted
                    self._take_back(plan)
                raise

    def _take_back(self, plan: StepPlan) -> None:
        """A step that was interrupted. Of several ranks some have begun what others have not, and
        wait for each other for ever: that is the engine's death."""
        if self._team is not None:
            self._fate.end(EngineDeadError("a step was interrupted between ranks"))
            return
        if self._tiering is not None:
            self._tiering.end_loads()
        self._exchange.end_loads()
        self.scheduler.roll_back(plan)
        self.runner.roll_back()

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

    def _only_copy(self, plan: StepPlan) -> None:
        """A plan that computes nothing has no outcome."""
        if plan.only_copies:
            with self._fate.fatal(BaseException):
                self.runner.copy(plan)
                self._exchange.fetch(plan.loads, self.runner.mark)

    def _await_copies(self) -> bool:
        """Nothing can be computed before something comes: if that is from a tier, wait a little."""
        if self._tiering is None or not self._tiering.is_busy:
            return False
        with self._rolling_back(StepPlan(sequences=())):
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


def _is_mostly_judging(plan: StepPlan) -> bool:
    """Whether most of a step's sequences have drafts: then the others wait with them, rather than
    being in steps of their own between."""
    return 2 * sum(sequence.num_drafts > 0 for sequence in plan.sequences) > len(plan.sequences)
