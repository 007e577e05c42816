"""The running answers: tells the runner how to sample them, and hands them the tokens that were
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from msgspec import structs

from milepost.engine.constraints import masks
from milepost.engine.loop.requests import Completion, RequestGroup
from milepost.engine.text import TokenTexts
from milepost.runner.runner import RunnerOutput
from milepost.scheduler.plans import SamplingPlan, SequencePlan, StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler


class RunningCompletions:
    """By request number, from when the scheduler has their requests until their jobs are over.

    With `counts_are_kept` the executor counts the tokens of answers itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        texts: TokenTexts | None,
        *,
        counts_are_kept: bool,
    ) -> None:
        self._scheduler = scheduler
        self._texts = texts
        self._counts_are_kept = counts_are_kept
        self._known: dict[int, tuple[RequestGroup, Completion]] = {}
        self._held: set[int] = set()
        """Requests of which a token may have to be known before the next is sampled."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, job: RequestGroup, answer: Completion) -> None:
        number = answer.request.number
        self._known[number] = (job, answer)
        if answer.guide is not None or job.params.has_penalties:
            self._held.add(number)

    def forget(self, job: RequestGroup) -> list[Request]:
        """A job is over; returns those of its requests that were known."""
        numbers = [answer.request.number for answer in job.answers]
        self._held.difference_update(numbers)
        found = [self._known.pop(number, None) for number in numbers]
        return [known[1].request for known in found if known is not None]

    def group_of(self, request: Request) -> RequestGroup:
        """Returns the group that a known request belongs to."""
        return self._known[request.number][0]

    def wait_for(self, num_ahead: int, sequences: Sequence[SequencePlan]) -> bool:
        """Whether any of those that are ahead has to know its last so many tokens before the next
        is sampled."""
        held = self._held
        return bool(held) and any(
            self._waits(sequence.number, num_ahead)
            for sequence in sequences
            if sequence.is_ahead and sequence.number in held
        )

    def _waits(self, number: int, num_ahead: int) -> bool:
        job, answer = self._known[number]
        return answer.waits_for(num_ahead, job.params, counts_are_kept=self._counts_are_kept)

    def choices(self, plan: StepPlan, num_ahead: int) -> tuple[SamplingPlan, ...]:
        """What the choice of each token that a step samples depends on. Of its sequences that are
        ahead, so many tokens are not known yet."""
        sampling = [sequence for sequence in plan.sequences if sequence.samples]
        pairs = [self._known[sequence.number] for sequence in sampling]
        allowed = masks([answer.guide for _, answer in pairs])
        rows: list[SamplingPlan] = []
        for sequence, (job, answer), own in zip(sampling, pairs, allowed, strict=True):
            mask = own
            if answer.is_dead_end(job.params, own):
                answer.note_dead_end(job.params)
                mask = None  # whatever comes is left out
            if sequence.num_drafts:
                rows += answer.samplings(job.params, drafts=sequence.drafts, mask=mask)
            else:
                unknown = num_ahead if sequence.is_ahead else 0
                rows.append(answer.sampling(job.params, num_ahead=unknown, mask=mask))
        return tuple(rows)

    def take(self, plan: StepPlan, output: RunnerOutput) -> list[RequestGroup]:
        """Hand each run of tokens to its answer, then what of it belongs to the answer to the
        scheduler; returns the jobs that have new ones, in the order of being added."""
        for scores in output.prompt_scores:
            known = self._known.get(scores.number)
            if known is not None:
                known[1].add_prompt_scores(scores)
        tokens = dict(output.result.tokens)
        progressed: dict[RequestGroup, None] = {}
        for number, run in output.sampled.items():
            job, answer = self._known.get(number, (None, None))
            if answer is None or answer.request.finish_reason is not None:
                continue
            if answer.dead_end is None:
                tokens[number] = answer.take(run, job.params, self._texts)
            else:
                self._scheduler.finish(answer.request, answer.dead_end)
                answer.num_left_out = len(run)
                answer.text.flush()
                progressed[job] = None
        result = structs.replace(output.result, tokens=tokens)
        for progress in self._scheduler.update(plan, result):
            job, answer = self._known[progress.request.number]
            if answer.ending is not None:
                self._scheduler.finish(answer.request, answer.ending)
                answer.request.finish_reason = answer.ending
            progressed[job] = None
        return sorted(progressed, key=attrgetter("number"))

    def note_drafts(self, plan: StepPlan, num_tokens: Mapping[int, int]) -> None:
        """Have answers count the drafts that a step verified; `num_tokens` were sampled for each
        request."""
        for sequence in plan.sequences:
            known = self._known.get(sequence.number)
            if sequence.num_drafts and known is not None:
                known[1].verified(sequence.num_drafts, num_tokens[sequence.number] - 1)

    def possible(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """Of a request's drafts those that its form has."""
        guide = self._known[request.number][1].guide
        return drafts if guide is None else drafts[: guide.num_allowed(drafts)]
