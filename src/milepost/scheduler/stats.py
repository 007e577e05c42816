"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_waits: int = 0
    """Times that a request waited a step for a prefix that another one was computing."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_drafts: int = 0
    """Times that drafts of a request were judged."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of those."""
    num_accepted_by_position: list[int] = field(default_factory=list)
    """Of those, by their place among the drafts of a step."""

    def judged(self, num_drafts: int, num_accepted: int) -> None:
        """Note what became of a request's drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = num_drafts - len(self.num_accepted_by_position)
        self.num_accepted_by_position.extend([0] * missing)
        for place in range(num_accepted):
            self.num_accepted_by_position[place] += 1
