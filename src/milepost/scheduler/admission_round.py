"""Limits the admissions of one step, and records what became of the requests that it considered."""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.scheduler.request import Request

MAX_PASSED_OVER = 128
"""Number of waiting requests that a step passes over before it stops looking."""

MAX_LOOKS = 16
"""Largest number of prompts that a step looks up in the cache without admitting them."""

MAX_CHANGES = 64
"""Largest number of requests begun in a step plus states evicted for them; further requests wait
for the next step. Planning each takes 0.1 to 0.2 ms while a step of 17 ms or more runs, so it is
hidden. With a lower limit, fewer short prompts would share a step's weights."""


@dataclass(slots=True, kw_only=True)
class AdmissionRound:
    """The admissions of one step."""

    num_seats: int
    """Number of requests that may still begin."""
    bypassed: list[Request] = field(default_factory=list)
    """Requests without room, the most urgent first."""
    begun: list[Request] = field(default_factory=list)
    """Requests that were admitted."""
    passed_over: list[Request] = field(default_factory=list)
    """Requests that found no tokens or no room, or were held back."""
    num_passed_over: int = 0
    num_looks: int = 0
    """Number of prompts that were looked up and not admitted."""
    num_changes: int = 0
    """Number of requests begun and of states evicted for them."""
    last_priority: int | None = None
    """Priority of the least urgent running request, once it has been asked for."""
    is_held: bool = False
    """Whether a request that was passed over has waited too long for any other to go first."""

    @property
    def is_over(self) -> bool:
        """Whether no further request is admitted in this step."""
        return (
            not self.num_seats
            or self.is_held
            or self.num_passed_over >= MAX_PASSED_OVER
            or self.num_looks >= MAX_LOOKS
            or self.num_changes >= MAX_CHANGES
        )

    def admitted(self, request: Request, num_evicted: int) -> None:
        """Records that a request begins, and how many states were evicted for it."""
        self.num_seats -= 1
        self.num_looks -= 1
        self.num_changes += 1 + num_evicted
        if self.last_priority is not None:
            self.last_priority = max(self.last_priority, request.priority)
        self.begun.append(request)
