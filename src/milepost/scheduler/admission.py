"""Decides which of the waiting requests begin in a step.

They are considered in order. One is passed over if the step has no tokens for it, if there is no
room for it, or if it waits for a prefix that another one is computing; those behind it may go
first, within limits. However many wait, a step considers a bounded number.

With more live conversations than fit, admitting each at once would evict what the next one needs,
and nothing would ever hit. So a request for which the cache would have to evict what is likely to
be needed soon is *held back*: it waits as if there were no room, for MAX_HOLD_BACK_S at most, and
only while the prompts of others keep the machine busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.cache.allocation import Allocation
from milepost.cache.tree import Match
from milepost.scheduler.budget import Budget
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.outside import Offer, Outside, explained
from milepost.scheduler.queue import Queue
from milepost.scheduler.request import Request
from milepost.scheduler.sharing import PendingPrefixes
from milepost.scheduler.stats import SchedulerStats

MAX_BYPASSED = 256
"""Later requests that may be admitted past one that is passed over, before it holds the queue. With
fewer, conversations that don't fit together take turns too fast to reuse much (docs/policies.md,
holding back).
"""

MAX_HOLD_BACK_S = 600.0
"""The same in seconds of steps: as long as clients wait by default."""

BACKLOG_STEPS = 4
"""Steps that the prompts of other waiting requests would fill. With fewer nobody is held back: the
machine would idle, and the request wait, for a few hits more.
"""

MAX_PASSED_OVER = 128
"""Waiting requests that a step passes over, before it looks at no more."""

MAX_LOOKS = 16
"""Prompts that a step looks up in the cache without admitting them."""

MAX_CHANGES = 64
"""Requests that begin in a step and states that are evicted for them, before the others wait for
the next step. Each takes some 0.1 to 0.2 ms to plan, a step that prefills takes 17 ms on a GPU and
is planned while another one runs: so planning is hidden. With fewer, requests that leave little to
compute would share the weights that a step reads with fewer others.
"""


@dataclass(slots=True, kw_only=True)
class AdmissionRound:
    """The admissions of one step."""

    num_seats: int
    """Requests that may yet begin."""
    now_s: float
    """Seconds that steps have taken so far."""
    bypassed: list[Request] = field(default_factory=list)
    """Those that found no tokens or no room, the most urgent first."""
    num_passed_over: int = 0
    num_looks: int = 0
    num_changes: int = 0
    """Requests that have begun, and states that were evicted for them."""
    num_waiting_tokens: int | None = None
    """Tokens that waiting requests have yet to compute, once somebody has asked."""
    last_priority: int | None = None
    """Of those that run the least urgent one's, once somebody has asked."""
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
        """Note that a request begins, for which so many states were evicted."""
        self.num_seats -= 1
        self.num_changes += 1 + num_evicted
        if self.last_priority is not None:
            self.last_priority = max(self.last_priority, request.priority)
        for other in self.bypassed:
            other.num_bypasses += 1

    def pass_over(self, request: Request) -> bool:
        """Note that a request finds no tokens or no room; False, as an admission's outcome."""
        self.bypassed.append(request)
        self.num_passed_over += 1
        if request.passed_over_s is None:
            request.passed_over_s = self.now_s
        self.is_held = self.is_held or self.has_waited_long(request)
        return False

    def has_waited_long(self, request: Request) -> bool:
        """Whether others have gone before a request for as long as they may."""
        since_s = request.passed_over_s
        waited_s = 0.0 if since_s is None else self.now_s - since_s
        return waited_s >= MAX_HOLD_BACK_S or request.num_bypasses >= MAX_BYPASSED


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
        max_num_batched_tokens: int,
    ) -> None:
        self.now_s = 0.0
        """Seconds that steps have taken so far."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self.pending = PendingPrefixes(cache.grid)
        self._outside = outside
        self._stats = stats
        self._cache = cache
        self._waiting = waiting
        self._running = running

    def open(self, max_num_seqs: int) -> AdmissionRound:
        """Begin a step in which so many requests may run."""
        num_seats = 0
        if self._waiting:
            num_seated = sum(request.holds_seat for request in self._running)
            num_seats = max(max_num_seqs - num_seated, 0)
        return AdmissionRound(num_seats=num_seats, now_s=self.now_s)

    def candidates(self, num_seats: int) -> list[Request]:
        """The requests that a step may look at."""
        return self._waiting.first(num_seats + MAX_PASSED_OVER) if num_seats else []

    def consider(self, request: Request, budget: Budget, turn: AdmissionRound) -> bool:
        """Admit a waiting request if it can begin in this step."""
        if self._awaits(request):
            turn.num_passed_over += 1
            return False
        if not budget.can_begin(self._waiting.num_left(request)):
            if self._waiting.looks(request):
                turn.num_looks += 1
                match = self._cache.match(request.chain)
                if not self._waits_for_prefix(request, match):
                    offer = self._offer(request, match)
                    if offer is not None and self._begin_loading(request, match, turn, offer):
                        return not request.is_loading
            return turn.pass_over(request)
        if self._running and self._waiting.is_blocked(request):
            return turn.pass_over(request)
        match = self._cache.match(request.chain)
        if self._waits_for_prefix(request, match):
            turn.num_looks += 1
            turn.num_passed_over += 1
            return False
        offer = self._offer(request, match)
        if offer is not None:
            if offer.position > match.state_length:
                if not self._begin_loading(request, match, turn, offer):
                    turn.num_looks += 1
                    return turn.pass_over(request)
                return not request.is_loading
            match = explained(match, offer)
        if not budget.can_begin(request.num_tokens - match.state_length):
            turn.num_looks += 1
            self._waiting.refresh(request, match)
            return turn.pass_over(request)
        if not self._admit(request, match, turn):
            turn.num_looks += 1
            self._waiting.block(request, match)
            return turn.pass_over(request)
        return True

    def _offer(self, request: Request, match: Match) -> Offer | None:
        """What of a request can come from outside."""
        offer = self._outside.find(request, match)
        request.offered = offer.position if offer is not None else 0
        return offer

    def _begin_loading(
        self, request: Request, match: Match, turn: AdmissionRound, offer: Offer
    ) -> bool:
        """Admit a waiting request that goes on from what a source has; it needs no tokens yet."""
        if not self._outside.may_load or offer.position <= match.state_length:
            return False
        if self._running and self._waiting.is_blocked(request):
            return False
        if not self._admit(request, explained(match, offer), turn, load_to=offer.position):
            self._waiting.block(request, match)
            return False
        if request.is_loading:
            self._outside.begin(request, offer)
        return True

    def close(self, budget: Budget, turn: AdmissionRound) -> None:
        """Where a step computes no prefill, the first that was passed over looks for room again."""
        if turn.bypassed and not budget.has_prefill:
            turn.bypassed[0].blocked_at = None

    def _awaits(self, request: Request) -> bool:
        """Whether what a request was found to wait for is still to come."""
        if request.awaits is None or not request.awaits.is_pending:
            return False
        self._stats.num_waits += 1
        return True

    def _waits_for_prefix(self, request: Request, match: Match) -> bool:
        """Whether a running prefill computes this prefix; then it keeps its state there."""
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
        num_evicted = self._cache.stats.num_evicted
        allocation = self._find_room(request, match, turn, load_to)
        if allocation is None:
            return False
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

    def _find_room(
        self, request: Request, match: Match, turn: AdmissionRound, load_to: int | None
    ) -> Allocation | None:
        """From the deepest resume; a request that is alone gets a cold one if need be. It waits if
        even for that too much is lent to others."""
        first_time = request.report is None
        allocation = self._cache.admit(
            request.chain,
            match,
            marks=request.marks,
            first_time=first_time,
            holds_back=self._holds_back(request, turn),
            load_to=load_to,
        )
        if allocation is None and not self._running:
            match = self._cache.match(request.chain, limit=0)
            allocation = self._cache.admit(
                request.chain, match, marks=request.marks, first_time=first_time
            )
            assert allocation is not None or self._outside.has_lent, (
                "a request that `add` took fits the pool when it is alone"
            )
        return allocation

    def _is_backlogged(self, request: Request, turn: AdmissionRound) -> bool:
        """Whether other waiting requests would keep the machine busy for some steps."""
        if turn.num_waiting_tokens is None:
            first = self._waiting.first(MAX_PASSED_OVER)
            turn.num_waiting_tokens = sum(map(self._waiting.num_left, first))
        others = turn.num_waiting_tokens - self._waiting.num_left(request)
        return others > BACKLOG_STEPS * self._max_num_batched_tokens

    def _holds_back(self, request: Request, turn: AdmissionRound) -> bool:
        """Whether others may go first, so that what they need is not evicted for this one. Not if
        nothing else runs, few tokens wait to be computed, it has run before, something less urgent
        runs, or it has waited for long.
        """
        if not self._running or request.num_preemptions or not self._is_backlogged(request, turn):
            return False
        if turn.last_priority is None:
            turn.last_priority = max(other.priority for other in self._running)
        return turn.last_priority <= request.priority and not turn.has_waited_long(request)
