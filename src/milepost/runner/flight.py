"""A step in flight: what was launched, and where its tokens will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from milepost.runner.acceptance import Accept, accept_equal, runs_of
from milepost.runner.choice import Choice, Drafts, SampledToken
from milepost.runner.prompt_scores import PromptScores
from milepost.scheduler.plans import StepPlan


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A step that was launched and may still be running."""

    plan: StepPlan
    numbers: Sequence[int]
    """Of the requests that sample, in the order of the choice's rows: of one with drafts once more
    for each of them."""
    launched_s: float = field(default_factory=perf_counter)
    """By the host's clock."""
    begun: torch.cuda.Event | None = None
    """Passes when the device begins it, if one does."""
    queued_s: float = field(default_factory=perf_counter)
    """When the device had the first work of it, by the host's clock."""
    is_late: bool = False
    """Whether the step before it was over by then, so that the device had nothing to do."""
    logits: Tensor | None = None
    """[R, vocabulary], what their tokens are sampled from; None where nobody samples. Overwritten
    by a later step."""
    best: Tensor | None = None
    """[R], the likeliest token of each, where the step finds it."""
    hidden: Tensor | None = None
    """[R, C], what their logits were made of; kept where a head drafts."""
    choice: Choice | None = None
    """None until the tokens are being sampled."""
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Request number -> what may follow its tokens, where that is known at once."""
    drafting: Drafts | None = None
    """Where it comes from the device."""
    prompt_scores: Sequence[PromptScores] = ()
    accept: Accept = accept_equal
    """Which drafts are accepted."""

    @property
    def is_timed(self) -> bool:
        """Whether a device runs it, and somebody waits for its end."""
        return self.begun is not None and self.choice is not None

    @property
    def device_s(self) -> float:
        """What it took there, once it was read."""
        assert self.begun is not None
        assert self.choice is not None
        assert self.choice.is_copied is not None
        return self.begun.elapsed_time(self.choice.is_copied) / 1e3

    @property
    def is_done(self) -> bool:
        """Whether its tokens are there."""
        event = self.choice.is_copied if self.choice is not None else None
        return event is not None and event.query()

    @property
    def is_sampled(self) -> bool:
        """Whether the sampling of its tokens has been launched, if anybody samples."""
        return self.choice is not None or not self.numbers

    @property
    def token_ids(self) -> Tensor:
        """Sampled tokens [R] int64, on the device."""
        assert self.choice is not None, "a step that is followed samples"
        return self.choice.token_ids

    def places(self, plan: StepPlan) -> list[int]:
        """For each sequence that is ahead in the plan that follows, the row that its token is
        sampled in. Those sequences stand first, one token each.
        """
        places = {number: place for place, number in enumerate(self.numbers)}
        return [places[s.number] for s in plan.sequences if s.is_ahead]

    def read_drafts(self) -> Mapping[int, Sequence[int]]:
        """Wait for what may follow the tokens, by request number."""
        return self.drafts if self.drafting is None else self.drafting.read()

    def read(self) -> dict[int, list[SampledToken]]:
        """Wait for the tokens; the run of each request by its number: of one with drafts, as far as
        they are accepted."""
        assert self.is_sampled, "only what was sampled can be read"
        tokens = self.choice.read() if self.choice is not None else []
        assert len(tokens) == len(self.numbers), "a token for each that samples"
        return runs_of(self.plan, tokens, self.accept)
