"""Estimates how long a new request would wait before it begins, and finds requests that have waited
too long.

The estimate is the cost of all requests that would go first, divided by the cost that has begun per
second lately. That rate is measured while requests wait, so it covers whatever they wait for: the
tokens of a step, seats, or memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from math import ceil, inf

from milepost.cache.tree import Match
from milepost.errors import QueueWaitError
from milepost.scheduler.admission import MAX_HOLD_BACK_S, Admission
from milepost.scheduler.queue import STEP_TOKENS, Queue
from milepost.scheduler.request import Request
from milepost.scheduler.stats import SchedulerStats

WINDOW_S = 30.0
"""Seconds of steps over which the rate is averaged."""

LEAST_MEASURED_S = 1.0
"""Seconds of steps with a queue before the measured rate is used."""


class Backlog:
    """Watches the requests of `waiting`. None of them should wait longer than `max_wait_s`."""

    def __init__(
        self, waiting: Queue, admission: Admission, stats: SchedulerStats, max_wait_s: float
    ) -> None:
        self.max_wait_s = max_wait_s
        self._waiting = waiting
        self._admission = admission
        self._stats = stats
        self._arrived: deque[Request] = deque()
        """New requests in order of arrival; some may have begun."""
        self._cost_begun = 0
        """Cost of all requests that had begun at the last step."""
        self._recent_cost = 0.0
        self._recent_s = 0.0
        self._had_queue = False

    def add(self, request: Request) -> None:
        """Records that a request has begun to wait."""
        self._arrived.append(request)

    def ran(self, seconds: float) -> None:
        """Records the duration of a step. It counts if requests waited before or after the step."""
        begun = self._waiting.cost_begun - self._cost_begun
        self._cost_begun = self._waiting.cost_begun
        if self._had_queue or self._waiting:
            kept = max(1 - seconds / WINDOW_S, 0.0)
            self._recent_cost = self._recent_cost * kept + begun
            self._recent_s = self._recent_s * kept + seconds
        self._had_queue = bool(self._waiting)

    def check(self, request: Request, match: Match) -> None:
        """Raises QueueWaitError if a new request would wait longer than `max_wait_s`."""
        cost = STEP_TOKENS + request.num_tokens - match.state_length
        ahead = self._order().cost_ahead(request.priority, cost)
        wait_s = self._seconds(ahead)
        if wait_s > self.max_wait_s:
            self._stats.num_refused_early += 1
            raise QueueWaitError(
                f"the request would wait about {min(wait_s, MAX_HOLD_BACK_S):.0f} s for its turn; "
                f"this server lets none wait longer than {self.max_wait_s:g} s: try again later",
                retry_after_s=_retry_after_s(wait_s - self.max_wait_s),
            )

    def take_late(self) -> list[tuple[Request, QueueWaitError]]:
        """Returns requests that have waited too long and have never begun, each once, with the
        errors for their clients. Goes through the waiting requests once, however many are late."""
        late = self._pop_late()
        if not late:
            return []
        self._stats.num_ended_late += len(late)
        order = self._order()
        return [(request, self._too_late(request, order)) for request in late]

    def _pop_late(self) -> list[Request]:
        late, arrived = [], self._arrived
        while arrived:
            request = arrived[0]
            is_waiting = request.reservation is not None and request.report is None
            if is_waiting and self._admission.now_s - request.queued_s <= self.max_wait_s:
                break
            arrived.popleft()
            if is_waiting:
                late.append(request)
        return late

    def _too_late(self, request: Request, order: QueueOrder) -> QueueWaitError:
        """Returns the error for a request that has waited too long. Its retry time is the time that
        the requests ahead of it need."""
        cost = self._cost(request)
        wait_s = self._seconds(order.cost_ahead(request.priority, cost) - cost)
        return QueueWaitError(
            f"the request has waited {self.max_wait_s:g} s for its turn, and this server lets none "
            "wait longer: try again later",
            retry_after_s=_retry_after_s(wait_s),
        )

    def _order(self) -> QueueOrder:
        now_s = self._admission.now_s
        entries = [(r.priority, now_s - r.queued_s, self._cost(r)) for r in self._waiting]
        return QueueOrder(entries, self.max_wait_s)

    def _cost(self, request: Request) -> int:
        return STEP_TOKENS + self._waiting.num_left(request)

    def _seconds(self, cost: int) -> float:
        return cost / self._rate if cost else 0.0

    @property
    def _rate(self) -> float:
        """Cost that begins per second while requests wait; a small number if none does."""
        if self._recent_s >= LEAST_MEASURED_S:
            return max(self._recent_cost / self._recent_s, 1e-3)
        token_s = self._admission.token_s
        return 1 / token_s if token_s else inf


class QueueOrder:
    """Waiting requests in the order in which they would begin before one that has waited for
    `max_wait_s`.
    """

    def __init__(self, entries: Iterable[tuple[int, float, int]], max_wait_s: float) -> None:
        """Sorts `entries`: priority, seconds waited and cost of each waiting request."""
        self._max_wait_s = max_wait_s
        placed = sorted(
            ((priority, -(waited_s + max_wait_s) / cost), cost)
            for priority, waited_s, cost in entries
        )
        self._places = [place for place, _ in placed]
        self._costs = list(accumulate((cost for _, cost in placed), initial=0))

    def cost_ahead(self, priority: int, cost: int) -> int:
        """Returns the cost of all that would begin before a request of this cost."""
        return self._costs[bisect_right(self._places, (priority, -self._max_wait_s / cost))]


def _retry_after_s(wait_s: float) -> int:
    return max(ceil(min(wait_s, MAX_HOLD_BACK_S)), 1)
