"""Runs between two steps: records which drafts were accepted, and proposes new ones.

Connects a drafter and a policy to the scheduler. It knows nothing of output constraints or
sampling: the caller may cut drafts.

A step that is planned ahead has no drafts. So a request that will get some is left out of such
steps (`Request.awaits_drafts`); the others run ahead as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.speculative.drafter import Drafter, DraftWish, FirstOf, HeadDrafter
from milepost.speculative.lookup import NgramDrafter, SuffixDrafter
from milepost.speculative.policy import Adaptive, Always, Policy, Standing, Verified
from milepost.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

AllowedDrafts = Callable[[Request, Sequence[int]], Sequence[int]]
"""Returns the part of a request's drafts that its output constraint allows."""


class Speculation:
    """Drafts for the requests that `scheduler` runs. `head` is given if the model's own head is
    among the drafter's methods."""

    def __init__(
        self,
        drafter: Drafter,
        policy: Policy,
        scheduler: Scheduler,
        head: HeadDrafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.policy = policy
        self._scheduler = scheduler
        self._head = head
        self._allotted: dict[int, int] = {}
        """Maps a request's number to the drafts that it was worth at the last decision."""

    def num_behind(self, plan: StepPlan) -> int:
        """Returns how many tokens the model's head drafts after each token that a step samples."""
        if self._head is None:
            return 0
        known = [s.number for s in plan.sequences if s.samples and not s.is_ahead]
        return max((self._allotted.get(number, 0) for number in known), default=0)

    def learn(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Takes over the drafts that the model's head made after a step."""
        if self._head is not None:
            self._head.learn(drafts)

    def note(self, plan: StepPlan, num_tokens: dict[int, int], seconds: float | None) -> None:
        """Records a step. `num_tokens` maps each request to the tokens sampled for it; `seconds` is
        the step's duration, if known."""
        verified = [
            Verified(
                number=sequence.number,
                length=sequence.start,
                num_drafts=sequence.num_drafts,
                num_accepted=num_tokens[sequence.number] - 1,
            )
            for sequence in plan.sequences
            if sequence.num_drafts and sequence.samples
        ]
        computing = [s for s in plan.sequences if s.num_tokens]
        decodes = [s for s in computing if s.num_tokens == 1 + s.num_drafts and s.samples]
        is_pure = len(decodes) == len(computing)
        self.policy.note(len(decodes), verified, seconds if is_pure else None)

    def propose(self, cut: AllowedDrafts) -> None:
        """Hands drafts to the scheduler for the next step to be planned."""
        requests = [r for r in self._scheduler.running if r.num_output_tokens and r.may_go_on]
        wanted = self.policy.allot([Standing(r.number, r.num_tokens) for r in requests])
        if not any(wanted):  # usual where drafts do not pay
            self._allotted = {}
            for request in requests:
                request.awaits_drafts = False
            return
        self._allotted = {r.number: most for r, most in zip(requests, wanted, strict=True)}
        wishes = []
        for request, most in zip(requests, wanted, strict=True):
            if request.is_in_flight:
                request.awaits_drafts = most > 0 and self.drafter.is_ready(request)
            elif most:
                wishes.append(DraftWish(request, most))
            else:
                request.awaits_drafts = False
        if not wishes:
            return
        for wish, drafts in zip(wishes, self.drafter.propose(wishes), strict=True):
            drafts = cut(wish.request, drafts) if drafts else ()
            wish.request.awaits_drafts = bool(drafts) or self._head is not None
            if drafts:
                self._scheduler.propose(wish.request, drafts)

    def forget(self, request: Request) -> None:
        """Forgets a request that is over."""
        self.drafter.forget(request)
        self.policy.forget(request.number)


def speculation_of(
    wanted: SpeculativeConfig | None, scheduler: Scheduler, num_drafts: int, *, has_head: bool
) -> Speculation | None:
    """Returns what drafts for the scheduler's requests; None if nothing is drafted."""
    if wanted is None or not num_drafts:
        return None
    if wanted.rejection_sample_method == "synthetic":
        logger.warning("speculative_config: drafts are accepted at random, answers are wrong")
    head = HeadDrafter() if has_head else None
    policy = Adaptive(wanted.num_tokens) if wanted.adaptive else Always(wanted.num_tokens)
    return Speculation(drafter_of(wanted, head), policy, scheduler, head)


def drafter_of(config: SpeculativeConfig, head: HeadDrafter | None = None) -> Drafter:
    """Builds the drafter of a configuration; `head` is the model's own, if it has one."""
    drafters: list[Drafter] = []
    for method in config.methods:
        if method == "suffix":
            drafters.append(
                SuffixDrafter(
                    depth=config.suffix_decoding_max_tree_depth,
                    factor=config.suffix_decoding_max_spec_factor,
                    min_prob=config.suffix_decoding_min_token_prob,
                    max_answers=config.suffix_decoding_max_cached_requests,
                )
            )
        elif method == "ngram":
            drafters.append(NgramDrafter(*config.lookup))
        else:
            assert head is not None, "a head that is asked for is there"
            drafters.append(head)
    return drafters[0] if len(drafters) == 1 else FirstOf(drafters)
