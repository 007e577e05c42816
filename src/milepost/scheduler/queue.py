"""The waiting requests, most urgent first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from milepost.cache.tree import Match
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.request import Request

STEP_TOKENS = 1024
"""Fixed cost of a request, in tokens: that of a step besides its tokens."""


class Queue:
    """Waiting requests by priority and arrival. Each has a reservation in the memory for what it
    will resume from. A request without room is *blocked*, and not looked at again, until there is
    more room or a request is admitted that it could share a prefix with."""

    def __init__(self, memory: PrefixMemory) -> None:
        self._memory = memory
        self._requests: list[Request] = []
        self._num_admitted = 0
        self.cost_begun = 0
        """Tokens that requests had left to compute when they were admitted, plus a fixed cost for
        each."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self, num: int) -> list[Request]:
        """Returns the `num` most urgent requests as a new list."""
        return self._requests[:num]

    def add(self, request: Request) -> None:
        """Adds a request. Hashes its prompt first, since that takes longest and may be
        interrupted."""
        index = self._index(request)
        request.reservation = self._memory.expect(
            request.chain, index, first_time=request.report is None and request.max_tokens > 0
        )
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        assert request.reservation is not None
        index = self._index(request)
        assert self._requests[index] is request, "ranks differ, and stay as they are"
        del self._requests[index]
        self._memory.forget(request.reservation)
        request.reservation = None

    def num_left(self, request: Request) -> int:
        """Returns the number of tokens to compute after admission, as last looked up; more may be
        cached by now."""
        assert request.reservation is not None
        source = request.reservation.checkpoint
        cached = source.position if source is not None else 0
        return request.num_tokens - max(cached, request.offered)

    def take_news(self, request: Request) -> bool:
        """Returns whether any request was admitted since the last call for this one. If not, none
        can have begun to compute its prefix."""
        looked_at, request.looked_at = request.looked_at, self._num_admitted
        return looked_at != self._num_admitted

    def admit(self, request: Request) -> None:
        """Removes a request that was admitted. If it is queued again, its waiting time
        starts anew."""
        self.cost_begun += STEP_TOKENS + self.num_left(request)
        self.remove(request)
        self._num_admitted += 1
        request.blocked_at = request.awaits = request.held_until_s = None
        request.num_bypasses = request.offered = 0

    def refresh(self, request: Request, match: Match) -> None:
        """Records what a request would resume from now."""
        assert request.reservation is not None
        self._memory.refresh(request.reservation, match)

    def block(self, request: Request, match: Match, until_s: float | None = None) -> None:
        """Records that a request found no room, or is held back until `until_s`."""
        self.refresh(request, match)
        request.blocked_at = self._room
        request.held_until_s = until_s

    def is_blocked(self, request: Request, now_s: float) -> bool:
        """Whether a request that found no room, or was held back, would be refused again now."""
        if request.blocked_at is None:
            return False
        if request.held_until_s is not None and now_s >= request.held_until_s:
            return False
        num_admitted, num_pages, num_slots = request.blocked_at
        now_admitted, now_pages, now_slots = self._room
        return now_admitted == num_admitted and now_pages <= num_pages and now_slots <= num_slots

    def _index(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=attrgetter("rank"))

    @property
    def _room(self) -> tuple[int, int, int]:
        return self._num_admitted, *self._memory.room
