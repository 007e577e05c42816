"""Bounds one step's admissions, and notes what became of the requests that it looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.scheduler.request import Request

MAX_PASSED_OVER = 128
"""Waiting requests that a step passes over, before it looks at no more."""

MAX_LOOKS = 16
"""Prompts that a step looks up in the cache without admitting them."""

MAX_CHANGES = 64
"""Most requests to begin in a step, together with the states evicted for them; the others wait for
the next step. Each takes some 0.1 to 0.2 ms to plan while a step of 17 ms or more runs, so planning
is hidden. With fewer, short prompts would share a step's weights with fewer others.
"""


@dataclass(slots=True, kw_only=True)
class AdmissionRound:
    """The admissions of one step."""

    num_seats: int
    """Requests that may yet begin."""
    bypassed: list[Request] = field(default_factory=list)
    """Those that found no room, the most urgent first."""
    begun: list[Request] = field(default_factory=list)
    """Those that were admitted."""
    passed_over: list[Request] = field(default_factory=list)
    """Those that found no tokens or no room, or were held back."""
    num_passed_over: int = 0
    num_looks: int = 0
    num_changes: int = 0
    """Number of requests begun and of states evicted for them."""
    last_priority: int | None = None
    """Priority of the least urgent running request, once somebody has asked."""
    is_held: bool = False
    """Whether one of them has been bypassed often enough."""

    @property
    def is_over(self) -> bool:
        """Whether nobody else is admitted in this step."""
        return (
            not self.num_seats
            or self.is_held
            or self.num_passed_over >= MAX_PASSED_OVER
            or self.num_looks >= MAX_LOOKS
            or self.num_changes >= MAX_CHANGES
        )

    def admitted(self, request: Request, num_evicted: int) -> None:
        """Note that a request begins, and how many states were evicted for it."""
        self.num_seats -= 1
        self.num_changes += 1 + num_evicted
        if self.last_priority is not None:
            self.last_priority = max(self.last_priority, request.priority)
        self.begun.append(request)
