"""The running completions: tells the runner how to sample them, and hands them the tokens that were
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from msgspec import structs

from milepost.engine.constraints import masks
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.engine.text import TokenTexts
from milepost.errors import QueueWaitError
from milepost.runner.runner import RunnerOutput
from milepost.scheduler.plans import SamplingPlan, SequencePlan, StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler


class RunningCompletions:
    """The completions of the requests that the scheduler has, until their groups are over. With
    `counts_are_kept` the executor counts their tokens itself.
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
        """Numbers of the requests whose next sampling may depend on the token before."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, group: RequestGroup, completion: Completion) -> None:
        number = completion.request.number
        self._known[number] = (group, completion)
        if completion.guide is not None or group.params.has_penalties:
            self._held.add(number)

    def forget(self, group: RequestGroup) -> list[Request]:
        """Forgets a group that is over. Returns its requests that were known."""
        numbers = [completion.request.number for completion in group.completions]
        self._held.difference_update(numbers)
        forgotten = [self._known.pop(number, None) for number in numbers]
        return [known[1].request for known in forgotten if known is not None]

    def groups(self) -> list[RequestGroup]:
        """Returns the groups with requests that are known."""
        return list(dict.fromkeys(group for group, _ in self._known.values()))

    def take_late(self) -> list[tuple[RequestGroup, QueueWaitError]]:
        """Takes the groups that have waited for too long, none of whose completions has begun,
        with the errors for their clients."""
        late: dict[RequestGroup, QueueWaitError] = {}
        for request, error in self._scheduler.take_late():
            group = self.group_of(request) if request.finish_reason is None else None
            if group and all(one.request.report is None for one in group.completions):
                late[group] = error
        return list(late.items())

    def group_of(self, request: Request) -> RequestGroup:
        """Returns the group that a known request belongs to."""
        return self._known[request.number][0]

    def wait_for(self, num_ahead: int, sequences: Sequence[SequencePlan]) -> bool:
        """Whether the next token of any sequence that runs ahead can only be sampled once its last
        `num_ahead` tokens are known."""
        held = self._held
        return bool(held) and any(
            self._waits(sequence.number, num_ahead)
            for sequence in sequences
            if sequence.is_ahead and sequence.number in held
        )

    def _waits(self, number: int, num_ahead: int) -> bool:
        group, completion = self._known[number]
        return completion.waits_for(num_ahead, group.params, counts_are_kept=self._counts_are_kept)

    def choices(self, plan: StepPlan, num_ahead: int) -> tuple[SamplingPlan, ...]:
        """Returns the sampling of each token of a step. The last `num_ahead` tokens of sequences
        that are ahead are not known yet."""
        sampling = [sequence for sequence in plan.sequences if sequence.samples]
        pairs = [self._known[sequence.number] for sequence in sampling]
        allowed = masks([completion.guide for _, completion in pairs])
        rows: list[SamplingPlan] = []
        for sequence, (group, completion), mask in zip(sampling, pairs, allowed, strict=True):
            if completion.is_dead_end(group.params, mask):
                completion.note_dead_end(group.params)
                mask = None  # whatever comes is left out
            if sequence.num_drafts:
                rows += completion.samplings(group.params, drafts=sequence.drafts, mask=mask)
            else:
                unknown = num_ahead if sequence.is_ahead else 0
                rows.append(completion.sampling(group.params, num_ahead=unknown, mask=mask))
        return tuple(rows)

    def take(self, plan: StepPlan, output: RunnerOutput) -> list[RequestGroup]:
        """Hands the sampled tokens to their completions, and to the scheduler those that belong to
        the completion. Returns the groups that have new ones, by number."""
        for scores in output.prompt_scores:
            known = self._known.get(scores.number)
            if known is not None:
                known[1].add_prompt_scores(scores)
        tokens = dict(output.result.tokens)
        progressed: dict[RequestGroup, None] = {}
        for number, run in output.sampled.items():
            known = self._known.get(number)
            if known is None or known[1].request.finish_reason is not None:
                continue
            group, completion = known
            if completion.dead_end is None:
                tokens[number] = completion.take(run, group.params, self._texts)
            else:
                self._scheduler.finish(completion.request, completion.dead_end)
                completion.num_left_out = len(run)
                completion.text.flush()
                progressed[group] = None
        result = structs.replace(output.result, tokens=tokens)
        for progress in self._scheduler.update(plan, result):
            group, completion = self._known[progress.request.number]
            if completion.ending is not None:
                self._scheduler.finish(completion.request, completion.ending)
                completion.request.finish_reason = completion.ending
            progressed[group] = None
        return sorted(progressed, key=attrgetter("number"))

    def note_drafts(self, plan: StepPlan, num_tokens: Mapping[int, int]) -> None:
        """Has completions count the drafts of a step, given the number of sampled tokens by
        request."""
        for sequence in plan.sequences:
            known = self._known.get(sequence.number)
            if sequence.num_drafts and sequence.samples and known is not None:
                known[1].verified(sequence.num_drafts, num_tokens[sequence.number] - 1)

    def possible(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """Returns the drafts that a request's form allows."""
        guide = self._known[request.number][1].guide
        return drafts if guide is None else drafts[: guide.num_allowed(drafts)]
