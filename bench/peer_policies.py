"""Policies to compare Milepost's with, beside those of `milepost simulate`."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from milepost.cache import Kind
from milepost.cache.placement import PromptFacts, floor
from milepost.cache.tree import Checkpoint
from milepost.simulator.policies import POLICIES, CachePolicy, Lru, Pooled


class UsedLru(Lru):
    """LRU in which a use counts for the state that was resumed from, and for no other."""

    def of(self, checkpoint: Checkpoint) -> float:
        return checkpoint.used_at


class Capped(UsedLru):
    """LRU that keeps at most `cap` states on a path; the shallowest go first."""

    def __init__(self, cap: int) -> None:
        super().__init__()
        self._cap = cap

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        """Returns a bucket for each: the order changes with the states below."""
        return checkpoint, 0

    def of(self, checkpoint: Checkpoint) -> float:
        below, here = 0, checkpoint.deeper
        while here is not None and below < self._cap:
            below, here = below + 1, here.deeper
        return checkpoint.used_at - (self.clock if below >= self._cap else 0)


class Efficiency(UsedLru):
    """Recency plus tokens saved for each byte, both as ranks from 0 to 1 (Marconi, MLSys 2025,
    section 4, from the description in the paper). The weight is learned there, by replaying a
    window of requests with each of a grid; here it is given, so that the best one bounds it.
    """

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self._weight = weight
        self._longest = 1

    def bucket(self, checkpoint: Checkpoint) -> tuple[Hashable, float]:
        """Returns a bucket for each: the order changes as time goes by."""
        return checkpoint, 0

    def of(self, checkpoint: Checkpoint) -> float:
        saved = checkpoint.replay_tokens
        self._longest = max(self._longest, saved)
        return checkpoint.used_at / (self.clock or 1) + self._weight * saved / self._longest


def ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Places a state at the prompt's end."""
    last = floor(facts.prompt_length - 1, facts.grid)
    return {last: Kind.PROMPT_END} if start < last <= end else {}


def forks_and_ends(facts: PromptFacts, start: int, end: int) -> dict[int, Kind]:
    """Places states where a prompt leaves known KV, and at its end."""
    found = ends(facts, start, end)
    found |= {p: Kind.BRANCH_POINT for p in facts.branch_points if start < p <= end}
    return dict(sorted(found.items()))


_EVERY: tuple[CachePolicy | Pooled, ...] = (
    Pooled(
        name="vllm-half",
        about="vLLM's with states in half precision, as for Qwen3-Next on Hopper GPUs",
        state_share=0.5,
    ),
    CachePolicy(name="ends", about="the prompt's end; LRU", placement=ends, score=UsedLru),
    CachePolicy(
        name="forks-cap2",
        about="forks and ends; LRU, at most 2 on a path",
        placement=forks_and_ends,
        score=lambda: Capped(2),
    ),
    *(
        CachePolicy(
            name=f"efficiency-{weight:g}",
            about=f"forks and ends; recency plus {weight:g} times the tokens saved per byte",
            placement=forks_and_ends,
            score=partial(Efficiency, weight),
        )
        for weight in (0.25, 1.0, 4.0)
    ),
)
PEERS = {policy.name: policy for policy in _EVERY}
ALL_POLICIES = POLICIES | PEERS
