"""Decides which of the waiting requests begin in a step.

Requests are ordered by the time that they have waited for each second of computing that they cost.
So short ones pass long ones, and none starves. A request is passed over if the step has no tokens
for it, if there is no room for it, or if it waits for a prefix that another one is computing;
others may then go first, within limits. A step considers a bounded number of requests, however many
wait.

With more live conversations than fit, admitting each at once would evict what the next one needs,
and nothing would ever hit. So seconds are weighed against seconds. A request *displaces* cached
items that others are likely to ask for soon. They have to compute these again, and each such second
is a second more for all who wait, as far as the machine is busy with prompts. The request is held
back until it has waited for as long as it costs the others, counted from the last admission that
displaced anything, so such requests come one at a time. Where waits are limited nothing is held
back (`holds_back` is false): what is held past the limit is an answer lost, and with it the rest of
its conversation.
"""

from __future__ import annotations

from functools import partial
from math import inf

from milepost.cache.allocation import Allocation
from milepost.cache.tree import Match
from milepost.scheduler.admission_round import MAX_PASSED_OVER, AdmissionRound
from milepost.scheduler.budget import Budget
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.outside import Outside, explained
from milepost.scheduler.queue import STEP_TOKENS, Queue
from milepost.scheduler.request import Request
from milepost.scheduler.sharing import PendingPrefixes
from milepost.scheduler.stats import SchedulerStats

MAX_BYPASSED = 256
"""Number of later requests that may be admitted before a request without room; then it holds the
queue."""

MAX_HOLD_BACK_S = 600.0
"""Longest time in seconds of steps for which a request is held back: as long as clients wait by
default."""

BUSY_S = 30.0
"""Seconds of steps over which `busy_share` is averaged."""

NEWS = 32
"""Number of steps over which `token_s` is averaged."""


class Admission:
    """Admits from `waiting` into `running`."""

    def __init__(
        self,
        cache: PrefixMemory,
        waiting: Queue,
        running: list[Request],
        outside: Outside,
        stats: SchedulerStats,
        *,
        holds_back: bool = True,
    ) -> None:
        self.now_s = 0.0
        """Seconds that steps have taken so far."""
        self.token_s = 0.0
        """Recent time to compute one prompt token, in seconds; 0 if not known yet."""
        self.busy_share = 1.0
        """Recent share of the time in which steps computed prompts."""
        self._displaced_s = 0.0
        """Time of the last admission that displaced anything."""
        self.pending = PendingPrefixes(cache.grid)
        self._outside = outside
        self._stats = stats
        self._holds_back = holds_back
        self._cache = cache
        self._waiting = waiting
        self._running = running

    def _pass_over(self, request: Request, turn: AdmissionRound, *, has_room: bool = True) -> bool:
        """Records that a request keeps waiting: there are no tokens or no room for it, or it is
        held back. Returns False, the outcome of its admission."""
        turn.passed_over.append(request)
        turn.num_passed_over += 1
        if not has_room:
            turn.bypassed.append(request)
        turn.is_held = turn.is_held or self.has_waited_long(request)
        return False

    def open(self, max_num_seqs: int) -> AdmissionRound:
        """Begins a step in which `max_num_seqs` requests may run."""
        num_seats = 0
        if self._waiting:
            num_seated = sum(request.holds_seat for request in self._running)
            num_seats = max(max_num_seqs - num_seated, 0)
        return AdmissionRound(num_seats=num_seats)

    def candidates(self, turn: AdmissionRound) -> list[Request]:
        """Returns the requests to look at in a step: first those that have waited longest for what
        they cost or, if nothing runs, those that cost least."""
        if not turn.num_seats:
            return []
        candidates = self._waiting.first(turn.num_seats + MAX_PASSED_OVER)
        return sorted(candidates, key=self._place)

    def _place(self, request: Request) -> tuple[int, float, int]:
        """Sort key of a request. Requests that have waited for as long as they may come first, by
        arrival."""
        if self.has_waited_long(request):
            return request.priority, -inf, request.number
        cost = STEP_TOKENS + self._waiting.num_left(request)
        if not self._running:
            return request.priority, cost, request.number
        return request.priority, (request.queued_s - self.now_s) / cost, request.number

    def has_waited_long(self, request: Request) -> bool:
        """Whether a request has waited for `MAX_HOLD_BACK_S`, or was bypassed `MAX_BYPASSED` times,
        so that no other may go first."""
        waited_s = self.now_s - request.queued_s
        return waited_s >= MAX_HOLD_BACK_S or request.num_bypasses >= MAX_BYPASSED

    def num_left(self, request: Request) -> int:
        """Returns the number of tokens that a running or waiting request has yet to compute."""
        runs = request.allocation is not None
        return request.num_left if runs else self._waiting.num_left(request)

    def ran(self, num_tokens: int, seconds: float) -> None:
        """Records a step's duration in seconds, and how many prompt tokens it computed."""
        self.now_s += seconds
        is_busy = min(num_tokens / (2 * STEP_TOKENS), 1.0)
        self.busy_share += (is_busy - self.busy_share) * min(seconds / BUSY_S, 1.0)
        if num_tokens >= STEP_TOKENS:
            latest = seconds / num_tokens
            self.token_s += (latest - self.token_s) / NEWS if self.token_s else latest

    def consider(self, request: Request, budget: Budget, turn: AdmissionRound) -> bool:
        """Admits a waiting request if it can begin in this step. One that continues from what a
        source has needs no tokens of the step yet. Returns whether it was admitted and is ready."""
        if self._awaits(request):
            turn.num_passed_over += 1
            return False
        may_begin = budget.can_begin(self._waiting.num_left(request))
        if not may_begin and not self._waiting.take_news(request):
            return self._pass_over(request, turn)
        if self._running and self._waiting.is_blocked(request, self.now_s):
            return self._pass_over(request, turn, has_room=request.held_until_s is not None)
        turn.num_looks += 1
        match = self._cache.match(request.chain)
        if self._waits_for_prefix(request, match):
            turn.num_passed_over += 1
            return False
        offer = self._outside.find(request, match)
        request.offered = offer.position if offer is not None else 0
        if offer is not None and offer.position > match.state_length:
            is_begun = self._outside.may_load and self._admit(
                request, explained(match, offer), turn, load_to=offer.position
            )
            if is_begun and request.is_loading:
                self._outside.begin(request, offer)
        elif budget.can_begin(request.num_tokens - match.state_length):
            is_begun = self._admit(request, explained(match, offer), turn)
        else:
            self._waiting.refresh(request, match)
            return self._pass_over(request, turn)
        if is_begun:
            return not request.is_loading
        return self._pass_over(request, turn, has_room=request.held_until_s is not None)

    def close(self, budget: Budget, turn: AdmissionRound) -> None:
        """Counts the requests that went before others. If the step computes no prefill, the first
        request that was passed over looks for room again."""
        for request in turn.bypassed:
            request.num_bypasses += sum(other.rank > request.rank for other in turn.begun)
        if turn.passed_over and not budget.has_prefill:
            turn.passed_over[0].blocked_at = None

    def _awaits(self, request: Request) -> bool:
        """Whether the prefix that a request waits for is still being computed."""
        if request.awaits is None or not request.awaits.is_pending:
            return False
        self._stats.num_waits += 1
        return True

    def _waits_for_prefix(self, request: Request, match: Match) -> bool:
        """Whether a running prefill computes this prefix. If so, it is asked to keep its state
        there."""
        shared = request.awaits = self.pending.find(request, match)
        if shared is None:
            return False
        if shared.can_keep:
            self._cache.add_branch_point(shared.allocation, shared.position)
        self._stats.num_waits += 1
        return True

    def _admit(
        self, request: Request, match: Match, turn: AdmissionRound, load_to: int | None = None
    ) -> bool:
        displaced = 0.0
        if load_to is None and self._may_hold_back(request, turn):
            displaced = self._cache.displaced(match)
            until_s = self._until_s(request, displaced)
            if displaced and until_s > self.now_s:
                self._waiting.block(request, match, until_s)
                return False
        num_evicted = self._cache.stats.num_evicted
        allocation = self._find_room(request, match, load_to)
        if allocation is None:
            self._waiting.block(request, match)
            return False
        if displaced:
            self._displaced_s = self.now_s
        if request.report is None and not allocation.is_loading:
            request.report = allocation.report
        request.allocation = allocation
        request.num_idle_steps = 0
        self._waiting.admit(request)
        self._running.append(request)
        if self._cache.mode == "auto":
            self.pending.claim(request)
        turn.admitted(request, self._cache.stats.num_evicted - num_evicted)
        return True

    def _find_room(self, request: Request, match: Match, load_to: int | None) -> Allocation | None:
        """Returns an allocation from the deepest position to resume at, or None if there is no
        room. A request that is alone starts cold if need be; it waits only if too much is lent to
        others."""
        admit = partial(
            self._cache.admit, request.chain, marks=request.marks, reservation=request.reservation
        )
        allocation = admit(match, load_to=load_to)
        if allocation is None and not self._running:
            match = self._cache.match(request.chain, limit=0)
            allocation = admit(match)
            assert allocation is not None or self._outside.has_lent, (
                "a request that `add` took fits the pool when it is alone"
            )
        return allocation

    def _may_hold_back(self, request: Request, turn: AdmissionRound) -> bool:
        """Whether others may go first, so that what they need is not evicted for this request.
        False if waits are limited, if nothing else runs or waits, if the request has run before or
        has waited for long, or if something less urgent runs. Also false if the request is loaded
        from outside, since what it displaces can then be loaded too."""
        is_alone = not self._running or len(self._waiting) == 1
        if not self._holds_back or is_alone or request.num_preemptions:
            return False
        if turn.last_priority is None:
            turn.last_priority = max(other.priority for other in self._running)
        return turn.last_priority <= request.priority and not self.has_waited_long(request)

    def _until_s(self, request: Request, displaced: float) -> float:
        """Returns the time at which a request has waited for as long as the others lose by what it
        displaces. They lose the time to compute that again, multiplied by the number of those who
        wait and by the share of time in which the engine computes prompts."""
        since_s = max(request.queued_s, self._displaced_s)
        lost_s = displaced * self.token_s * len(self._waiting) * self.busy_share
        return min(since_s + lost_s, request.queued_s + MAX_HOLD_BACK_S)
