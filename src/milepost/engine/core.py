"""The step loop: requests in, outputs out, one `step` at a time.

Owns the jobs (a prompt with its n answers) and joins the pure scheduler with the runner. Single-
threaded; whoever drives it calls `step` while `has_work`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter

from msgspec import structs
from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.disaggregation.params import Remote
from milepost.engine.bell import Bell
from milepost.engine.detokenizer import detokenizer_for
from milepost.engine.exchange import connecting, publishing, wish_of
from milepost.engine.grammars import Form, Forms, check_combination, vocabulary_of
from milepost.engine.guidance import Guide, masks
from milepost.engine.metrics import Metric, collect
from milepost.engine.pace import Pace
from milepost.engine.prompts import Prompt, check_prompt, check_scores
from milepost.engine.requests import Answer, Job
from milepost.engine.setup import EngineParts, build
from milepost.engine.token_texts import TokenTexts
from milepost.engine.trace_recording import TraceRecorder
from milepost.errors import EngineDeadError, InvalidRequestError
from milepost.runner.runner import Flight, RunnerOutput
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import SamplingPlan, StepPlan, StepSampling
from milepost.scheduler.request import FinishReason, Request

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
        self._texts = TokenTexts(self.tokenizer) if self.tokenizer is not None else None
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.vocab_size
        self.sampling_defaults = parts.sampling_defaults
        self.facts = parts.facts
        self._end_token_ids = parts.end_token_ids
        self._answers: dict[int, tuple[Job, Answer]] = {}
        """By request number."""
        self._held: set[int] = set()
        """Requests of which a token is sampled only when the one before is known."""
        self._forms: Forms | None = None
        self._runs_ahead = parts.runs_ahead
        self._pace = Pace()
        self.bell = Bell() if config.kv_transfer_config is not None else None
        self._publisher = publishing(config, self.scheduler.outside)
        self.connector = connecting(config, self.scheduler, self.runner, self.bell)
        self._tiering = parts.tiering
        self._trace = TraceRecorder(config.record_trace) if config.record_trace else None
        self._is_stuck = False
        self._looking: dict[int, tuple[Job, Answer]] = {}
        """Not queued yet: another engine is asked what it has of them."""
        self.speculation = parts.speculation
        self._team = parts.team
        self._last_end_s: float | None = None
        """When the last step was taken, if work was left then."""
        self._under_way: Flight | None = None
        self._num_requests = 0
        self._death: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._looking)

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

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise what `add` would: InvalidRequestError, or EngineDeadError. Compiles the form."""
        self._check(prompt, params)
        self.form_of(params)

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        self._check_alive()
        check_prompt(
            prompt,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_cache_marks=self.config.max_cache_marks,
        )
        wish_of(prompt, self.config)
        params.check_vocab(self.vocab_size)
        check_scores(prompt, params)
        check_combination(params)
        detokenizer_for(self._texts, params)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        form: Form | None = None,
    ) -> Job:
        """Queue a prompt; `form` is what `form_of` made for it, if it was called before.

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
        form = form or self.form_of(params)
        number = self._num_requests
        self._num_requests += 1
        wish = wish_of(prompt, self.config)
        job = Job(number=number, prompt=prompt, params=params)
        job.prefills = wish is not None and wish.prefills and len(prompt.token_ids) > 1
        self._is_stuck = False
        salt = _salt(prompt, params, number)
        for index in range(params.n):
            request = self._request(f"{number}-{index}", job, priority, salt)
            request.num_prompt_logprobs = params.prompt_logprobs if index == 0 else None
            request.keeps_history = params.has_penalties
            seed = params.sample_seed(index, engine_seed=self.config.seed, request_number=number)
            text = detokenizer_for(self._texts, params)
            guide = self._guide(params, form)
            answer = Answer(index=index, request=request, text=text, seed=seed, guide=guide)
            remote = wish.remote if wish is not None and not index else None
            looking = None
            if job.prefills and self.connector is not None:
                looking = self.connector.look_elsewhere(request.chain)
            if looking is None:
                self._enter(job, answer, remote)
            else:
                self._looking[looking] = (job, answer)
            job.answers.append(answer)
        if self._trace is not None:
            self._trace.begin(job)
        return job

    def _enter(self, job: Job, answer: Answer, remote: Remote | None) -> None:
        """Have the scheduler serve a request, which may fetch something from elsewhere."""
        request = answer.request
        self.scheduler.add(request)
        if remote is not None and self.connector is not None:
            self.connector.want(request, remote)
        self._answers[request.number] = (job, answer)
        counts_are_kept = self.runner.executor.keeps_counts
        if answer.waits_for_tokens(job.params, counts_are_kept=counts_are_kept):
            self._held.add(request.number)

    def abort(self, job: Job) -> None:
        """End a job's answers that are not over; what they hold is free at once."""
        self._forget(job)
        for number in [number for number, known in self._looking.items() if known[0] is job]:
            self._looking.pop(number)[1].request.finish_reason = FinishReason.ABORT
        self._is_stuck = False
        if self._death is not None:
            return
        for answer in job.answers:
            self.scheduler.finish(answer.request, FinishReason.ABORT)
            answer.text.flush()
        self._settle()
        self._tell()

    def step(self) -> list[Job]:
        """Run one step; returns the jobs that have new tokens, in the order of being added.

        Raises EngineDeadError if the step fails: the state of its requests is lost, and so is the
        engine. One that is interrupted while the model runs is taken back: its requests are
        computed again by the steps that follow.
        """
        self._check_alive()
        self.hear()
        flight = self._under_way or self._start()
        if flight is None:
            self._is_stuck = not self._await_copies()
            self._tell()
            return []
        with self._rolling_back(flight.plan):
            self._under_way = self._start_ahead(flight)
            output = self.runner.collect(flight)
            if flight.is_timed:
                self._pace.note_step(flight.plan, flight.device_s)
            if self._tiering is not None:
                self._tiering.note_step(flight.plan, output.result.seconds)
        with self._fatal(BaseException):
            jobs = self._take(flight.plan, output)
            self._speculate(flight.plan, output)
        ahead = self._under_way
        if ahead is None:
            self._under_way = self._start_judging()
        elif not ahead.is_sampled:
            with self._rolling_back(ahead.plan):
                self._sample(ahead, num_ahead=0)
        for job in jobs:
            if job.is_finished:
                self._forget(job)
        self._settle()
        self._lend(jobs)
        self._tell()
        return jobs

    def hear(self) -> None:
        """Take in what has come from tiers and other engines, and give back what those have
        read."""
        if self._tiering is not None:
            with self._fatal(BaseException):
                self._tiering.poll()
        if self.connector is not None and self.bell is not None:
            self.bell.clear()
            with self._fatal(BaseException):
                for found in self.connector.settle():
                    if found.number in self._looking:
                        self._enter(*self._looking.pop(found.number), found.remote)
                    elif found.remote is not None:
                        self.connector.refuse(found.remote)
            self._is_stuck = False

    @property
    def alarm(self) -> socket.socket | None:
        """Can be read once another rank is lost; None without any."""
        return self._team.alarm if self._team is not None else None

    def check_ranks(self) -> None:
        """Raises EngineDeadError: one of them is lost."""
        assert self._team is not None, "only ranks are lost"
        with self._fatal(BaseException):
            raise self._team.failure()

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
        if self._tiering is not None and not self._answers and self._death is None:
            self._tiering.flush()

    def close(self) -> None:
        """Give back what the process does not give back by ending: addresses; and bring down what
        is to outlive it.
        """
        if self._tiering is not None and self._death is None:
            self._tiering.close()
        if self._trace is not None:
            self._trace.close()
        if self._publisher is not None:
            self._publisher.close()
        if self.connector is not None:
            self.connector.close()
        if self.bell is not None:
            self.bell.close()

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
        if self.connector is not None:
            counters = self.connector.counters.items()
            own += [Metric(name=f"milepost:{name}", value=value) for name, value in counters]
        return [*collect(self.scheduler), *own]

    def _request(self, id_: str, job: Job, priority: int, salt: str) -> Request:
        prompt, params = job.prompt, job.params
        length = len(prompt.token_ids) - job.prefills
        room = self.max_model_len - len(prompt.token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        own = params.stop_token_ids or ()
        ends = () if params.ignore_eos else self._end_token_ids
        return Request(
            id=id_,
            chain=self.scheduler.cache.chain(prompt.packed[:length], salt),
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset((*own, *ends)),
            marks=tuple(sorted({mark for mark in prompt.cache_marks if mark <= length})),
            priority=priority,
        )

    def form_of(self, params: SamplingParams) -> Form | None:
        """The form of the answers, compiled if it is not known; None for any. May be called from
        another thread. Raises InvalidRequestError for one that cannot be kept to."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if self._forms is None:
            if self.tokenizer is None:
                raise InvalidRequestError(f"{wanted.field}: no tokenizer is loaded")
            ends = tuple(self._end_token_ids)
            self._forms = Forms(vocabulary_of(self.tokenizer, self.vocab_size, ends))
        return self._forms.compile(wanted)

    def _guide(self, params: SamplingParams, form: Form | None) -> Guide | None:
        if form is None:
            return None
        after = params.structured_outputs.starts_after
        return Guide(form, self.vocab_size, self._end_token_ids, after)

    @contextmanager
    def _fatal(self, kind: type[BaseException]) -> Iterator[None]:
        """What raises this kind of exception in here is the engine's death."""
        try:
            yield
        except kind as error:
            self._death = error
            lost = None
            if self._team is not None:
                lost = self._team.failure() if self._team.has_lost_one else None
                self._team.close()
            if not isinstance(error, Exception) or isinstance(error, EngineDeadError):
                raise
            # What becomes of a step that misses a rank says less than what became of the rank.
            raise lost or EngineDeadError(f"the step loop failed: {error!r}") from error

    def _start(self) -> Flight | None:
        """Plan a step and launch it; None if there is nothing to do."""
        with self._fatal(BaseException):
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
            self._fetch(plan)
            self._sample(flight, num_ahead=0)
        return flight

    def _only_copy(self, plan: StepPlan) -> None:
        """A plan that computes nothing has no outcome."""
        if plan.only_copies:
            with self._fatal(BaseException):
                self.runner.copy(plan)
                self._fetch(plan)

    def _fetch(self, plan: StepPlan) -> None:
        """Have other engines' pages and states fetched, where a plan that was launched says so."""
        if self.connector is not None and plan.loads:
            self.connector.fetch(plan.loads, self.runner.mark())

    def _start_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step behind one that is under way, if it is known without its tokens.

        It samples at once unless it has to know them for that; then it samples when they are taken.
        """
        if not self._runs_ahead or _is_mostly_judging(flight.plan):
            return None
        began_s = perf_counter()
        with self._fatal(BaseException):
            plan = self.scheduler.follow(flight.plan)
        if plan is None or not plan.sequences:
            self._only_copy(plan or StepPlan(sequences=()))
            return None
        ahead = self.runner.launch(plan, before=flight)
        self._fetch(plan)
        held = self._held
        if not (held and any(s.is_ahead and s.number in held for s in plan.sequences)):
            self._sample(ahead, num_ahead=1)
        self._pace.note_planning(plan, perf_counter() - began_s, is_late=ahead.is_late)
        return ahead

    def _start_judging(self) -> Flight | None:
        """Launch the step behind one that was taken, where drafts kept it from being launched
        ahead: it runs while what was taken is handed on."""
        if not self._runs_ahead or self.speculation is None:
            return None
        if not self.scheduler.has_work or self.scheduler.only_folds:
            return None
        return self._start()

    def _sample(self, flight: Flight, *, num_ahead: int) -> None:
        """Have a launched step sample. Of its sequences that are ahead, so many tokens are not
        known yet."""
        sampling = [sequence for sequence in flight.plan.sequences if sequence.samples]
        pairs = [self._answers[sequence.number] for sequence in sampling]
        allowed = masks([answer.guide for _, answer in pairs])
        rows: list[SamplingPlan] = []
        for sequence, (job, answer), mask in zip(sampling, pairs, allowed, strict=True):
            if sequence.num_drafts:
                rows += answer.samplings(job.params, drafts=sequence.drafts, mask=mask)
            else:
                unknown = num_ahead if sequence.is_ahead else 0
                rows.append(answer.sampling(job.params, num_ahead=unknown, mask=mask))
        num_drafts = 0 if self.speculation is None else self.speculation.num_behind(flight.plan)
        self.runner.sample(flight, StepSampling(rows=tuple(rows), num_drafts=num_drafts))

    def _settle(self) -> None:
        """Where every answer is over, take the outcome of a step that turned out to be for nothing,
        and bring states to the ends of their answers.
        """
        only_folds = self.scheduler.only_folds
        if self.scheduler.has_work and not only_folds:
            return
        flight, self._under_way = self._under_way, None
        if flight is not None:
            with self._fatal(BaseException):
                self.scheduler.update(flight.plan, self.runner.collect(flight).result)
        if self.scheduler.only_folds:
            last = self._start()
            assert last is not None, "a fold is a step"
            with self._rolling_back(last.plan):
                output = self.runner.collect(last)
            with self._fatal(BaseException):
                self.scheduler.update(last.plan, output.result)

    def _lend(self, jobs: list[Job]) -> None:
        """Keep what was prefilled for other engines, and say where it is."""
        for job in jobs:
            if job.prefills and job.is_finished and self.connector is not None:
                salt = job.answers[0].request.chain.salt
                chain = self.scheduler.cache.chain(job.prompt.packed, salt)
                job.kv_transfer_params = self.connector.lend(chain)

    def _tell(self) -> None:
        """Tell whoever listens what has come and gone."""
        self.scheduler.outside.tell()

    @contextmanager
    def _rolling_back(self, plan: StepPlan) -> Iterator[None]:
        """An interruption leaves half-written states, so the step and what follows it is taken
        back; a failure is the engine's death.
        """
        with self._fatal(Exception):
            try:
                yield
            except (KeyboardInterrupt, SystemExit):
                self._under_way = None
                if self._death is None:  # else it was planning that was interrupted
                    self._take_back(plan)
                raise

    def _take_back(self, plan: StepPlan) -> None:
        """A step that was interrupted. Of several ranks some have begun what others have not, and
        wait for each other for ever: that is the engine's death."""
        if self._team is not None:
            self._death = EngineDeadError("a step was interrupted between ranks")
            self._team.close()
            return
        if self._tiering is not None:
            self._tiering.end_loads()
        if self.connector is not None:
            self.connector.end_loads()
        self.scheduler.roll_back(plan)
        self.runner.roll_back()

    def _take(self, plan: StepPlan, output: RunnerOutput) -> list[Job]:
        """Hand each run to its answer, then what of it belongs to the answer to the scheduler."""
        for scores in output.prompt_scores:
            known = self._answers.get(scores.number)
            if known is not None:
                known[1].add_prompt_scores(scores)
        tokens = dict(output.result.tokens)
        for number, run in output.sampled.items():
            job, answer = self._answers.get(number, (None, None))
            if answer is not None and answer.request.finish_reason is None:
                tokens[number] = answer.take(run, job.params, self.tokenizer)
        progressed: dict[Job, None] = {}
        for progress in self.scheduler.update(plan, structs.replace(output.result, tokens=tokens)):
            job, answer = self._answers[progress.request.number]
            if answer.ending is not None:
                self.scheduler.finish(answer.request, answer.ending)
                answer.request.finish_reason = answer.ending
            progressed[job] = None
        return sorted(progressed, key=attrgetter("number"))

    def _speculate(self, plan: StepPlan, output: RunnerOutput) -> None:
        """Take note of what became of drafts, and hand in new ones."""
        if self.speculation is None:
            return
        now_s, last_s = perf_counter(), self._last_end_s
        self._last_end_s = now_s if self.has_work else None
        num_tokens = {number: len(run) for number, run in output.sampled.items()}
        for sequence in plan.sequences:
            known = self._answers.get(sequence.number)
            if sequence.num_drafts and known is not None:
                known[1].judged(sequence.num_drafts, num_tokens[sequence.number] - 1)
        self.speculation.note(plan, num_tokens, None if last_s is None else now_s - last_s)
        self.speculation.learn(output.read_drafts())
        self.speculation.propose(self._possible)

    def _possible(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """Of a request's drafts those that its form has."""
        guide = self._answers[request.number][1].guide
        return drafts if guide is None else drafts[: guide.num_allowed(drafts)]

    def _forget(self, job: Job) -> None:
        if self._trace is not None:
            self._trace.end(job)
        for answer in job.answers:
            known = self._answers.pop(answer.request.number, None)
            self._held.discard(answer.request.number)
            if known is not None and self.speculation is not None:
                self.speculation.forget(answer.request)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(
                f"the step loop failed earlier ({self._death!r}): make a new engine"
            ) from self._death


def _is_mostly_judging(plan: StepPlan) -> bool:
    """Whether most of a step's sequences have drafts: then the others wait with them, rather than
    being in steps of their own between."""
    return 2 * sum(sequence.num_drafts > 0 for sequence in plan.sequences) > len(plan.sequences)


def _salt(prompt: Prompt, params: SamplingParams, number: int) -> str:
    """What is to be scored must be computed, all of it: under a salt of its own it hits nothing."""
    scored = params.prompt_logprobs is not None
    return f"{prompt.cache_salt}\0scored {number}" if scored else prompt.cache_salt
