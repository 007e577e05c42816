"""A step in flight: the plan that was launched, where its tokens will be, and which of its drafts
are accepted: those equal to the token that would have been sampled.

After each draft, the model's own token is sampled with the noise of its position, as if the drafts
before it had been sampled one by one. So a run equals what plain decoding would have returned,
sampled or greedy, for any drafts (Daliri, Musco and Suresh, Coupling without Communication, arXiv
2408.07978); drafts only decide how long the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from milepost.runner.choice import Choice, Drafts, PromptScores, SampledToken
from milepost.scheduler.plans import SequencePlan, StepPlan

TokenRun = list[SampledToken]
_BITS = 2**64 - 1
Accept = Callable[[SequencePlan, Sequence[int], Sequence[SampledToken]], TokenRun]
"""Returns the run of a sequence, given its drafts and the tokens sampled before each draft and
after the last."""


def accept_equal(
    _sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
) -> TokenRun:
    """Accepts the sampled tokens up to the first that differs from its draft."""
    num = 0
    while num < len(drafts) and sampled[num].token_id == drafts[num]:
        num += 1
    return list(sampled[: num + 1])


def accept_at(rates: Sequence[float]) -> Accept:
    """Accepts drafts at given rates, whatever they are: `rates[i]` is how often the first i + 1
    drafts are accepted together. For benchmarks only: answers are wrong."""

    def accept(
        sequence: SequencePlan, drafts: Sequence[int], sampled: Sequence[SampledToken]
    ) -> TokenRun:
        draw, num = _uniform(sequence.number << 32 | sequence.start), 0
        while num < len(drafts) and draw < rates[num]:
            num += 1
        return [*map(SampledToken, drafts[:num]), sampled[num]]

    return accept


def _uniform(number: int) -> float:
    """Returns a uniform number from 0 to 1 by mixing bits (Steele, Lea and Flood, SplitMix).
    Python's own generator would take as long as the rest of a run."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _BITS
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _BITS
    return (mixed ^ mixed >> 31) / (_BITS + 1)


def runs_of(plan: StepPlan, sampled: TokenRun, accept: Accept) -> dict[int, TokenRun]:
    """Returns the run of each request that samples. `sampled` holds all tokens that a step sampled,
    request by request."""
    runs, first = {}, 0
    for sequence in plan.sequences:
        if sequence.samples:
            end = first + 1 + sequence.num_drafts
            run, first = sampled[first:end], end
            if sequence.num_drafts:
                run = accept(sequence, sequence.drafts, run)
            runs[sequence.number] = run
    return runs


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightStep:
    """A step that was launched and may still be running."""

    plan: StepPlan
    numbers: Sequence[int]
    """Numbers of the sampling requests, one per row of the choice: a request with drafts appears
    once more for each draft."""
    launched_s: float = field(default_factory=perf_counter)
    """Host time of the launch."""
    begun: torch.cuda.Event | None = None
    """Passes when the device begins the step; None if no device runs it."""
    queued_s: float = field(default_factory=perf_counter)
    """Host time at which the device had its first work of the step."""
    is_late: bool = False
    """Whether the previous step had already ended by `queued_s`, so that the device was idle."""
    logits: Tensor | None = None
    """[R, vocabulary], the logits to sample from; None if no request samples. A later step
    overwrites them."""
    best: Tensor | None = None
    """[R], the likeliest token of each row, if the step computes it."""
    hidden: Tensor | None = None
    """[R, C], the hidden states of the logits; kept if a head drafts."""
    choice: Choice | None = None
    """The chosen tokens; None until sampling is launched."""
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Maps a request's number to its drafts, if they are known at once."""
    drafting: Drafts | None = None
    """The drafts, if they come from the device."""
    prompt_scores: Sequence[PromptScores] = ()
    accept: Accept = accept_equal
    """Decides which drafts are accepted."""

    @property
    def is_timed(self) -> bool:
        """Whether the step runs on a device and its end will be waited for."""
        return self.begun is not None and self.choice is not None

    @property
    def device_s(self) -> float:
        """Seconds that the step took on the device, once it was read."""
        assert self.begun is not None
        assert self.choice is not None
        assert self.choice.is_copied is not None
        elapsed_ms: float = self.begun.elapsed_time(self.choice.is_copied)
        return elapsed_ms / 1e3

    @property
    def is_done(self) -> bool:
        """Whether its tokens have arrived on the host."""
        event = self.choice.is_copied if self.choice is not None else None
        return event is not None and event.query()

    @property
    def is_sampled(self) -> bool:
        """Whether the sampling of its tokens has been launched, or no request samples."""
        return self.choice is not None or not self.numbers

    @property
    def token_ids(self) -> Tensor:
        """Sampled tokens [R] int64, on the device."""
        assert self.choice is not None, "a step that is followed samples"
        return self.choice.token_ids

    def places(self, plan: StepPlan) -> list[int]:
        """Returns, for each sequence of the next plan that is ahead, the row in which its token is
        sampled. Those sequences stand first, with one token each."""
        places = {number: place for place, number in enumerate(self.numbers)}
        return [places[s.number] for s in plan.sequences if s.is_ahead]

    def num_forced(self) -> list[int]:
        """Returns how many drafts of each sampling request are accepted whatever is sampled, or -1
        if the sampled tokens decide."""
        sampling = [sequence for sequence in self.plan.sequences if sequence.samples]
        if self.accept is accept_equal:
            return [-1] * len(sampling)
        unknown = SampledToken(-1)
        return [
            len(self.accept(each, each.drafts, [unknown] * (1 + each.num_drafts))) - 1
            for each in sampling
        ]

    def read_drafts(self) -> Mapping[int, Sequence[int]]:
        """Waits for the drafts, and returns them by request number."""
        return self.drafts if self.drafting is None else self.drafting.read()

    def read(self) -> dict[int, list[SampledToken]]:
        """Waits for the tokens. Returns the run of each request by its number; with drafts, the run
        ends after the last accepted one."""
        assert self.is_sampled, "only what was sampled can be read"
        tokens = self.choice.read() if self.choice is not None else []
        assert len(tokens) == len(self.numbers), "a token for each that samples"
        return runs_of(self.plan, tokens, self.accept)
