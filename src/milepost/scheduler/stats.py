"""The scheduler's counters."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_BOUNDS = (1, *(2**power for power in range(3, 15)))
"""Upper bounds of a step's tokens, by which steps are counted: 1 and 8 to 16,384."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_waits: int = 0
    """Number of times a request waited a step for a prefix being computed by another one."""
    num_refused_early: int = 0
    """Requests refused on arrival, because they would have waited too long."""
    num_ended_late: int = 0
    """Requests ended because they had waited too long."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_encoded: int = 0
    """Pictures that the vision tower encoded."""
    encoded_tokens: int = 0
    """Tokens of those pictures."""
    num_encoder_hits: int = 0
    """Pictures whose encoder outputs were still on the device when a prompt reached them."""
    num_drafts: int = 0
    """Number of times that a request's drafts were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of drafts that were accepted."""
    num_steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    """Number of steps by their tokens: one count for each of STEP_BOUNDS, and one for
    larger steps."""
    num_runs: list[int] = field(default_factory=list)
    """Number of times a request's drafts were verified, by the number accepted."""

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a request's verified and accepted drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = 1 + num_drafts - len(self.num_runs)
        if missing > 0:
            self.num_runs.extend([0] * missing)
        self.num_runs[num_accepted] += 1

    def stepped(self, num_tokens: int) -> None:
        """Counts a step by its number of tokens."""
        self.num_steps_by_tokens[bisect_left(STEP_BOUNDS, num_tokens)] += 1

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that all steps have computed, of prompts and of answers."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def num_accepted_by_position(self) -> list[int]:
        """Number of accepted drafts, by their place among the drafts of a step."""
        return [sum(self.num_runs[place:]) for place in range(1, len(self.num_runs))]
