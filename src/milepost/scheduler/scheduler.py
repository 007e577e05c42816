"""Continuous batching with chunked prefill under a token budget, over the prefix cache.

Owns the requests from `add` to their terminal event. Makes plans and takes facts; no tensors, no
clock, no I/O. One step: `schedule()` gives a plan, somebody runs it, `update(plan, result)` takes
the outcome, or `retract(plan)` if it was cut short. Between `schedule` and `update`, `follow(plan)`
may plan one further step, whose outcome is taken after that of `plan`.

Order within a step: decodes, then running prefills, then waiting requests by priority and arrival.
A chunk that is not a prompt's last ends on the grid. Memory that runs out is taken from the
youngest running request, whose state goes into the cache, so that its return is a hit.

With more live conversations than fit, admitting each at once would evict what the next one needs,
and nothing would ever hit. So a request for which the cache would have to give up what is likely to
be asked for soon waits like one that finds no room, until enough others have gone first.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

from milepost.cache.placement import GRID, Kind, floor
from milepost.cache.plans import Lease, Match
from milepost.errors import InvalidRequestError
from milepost.scheduler.memory import Memory
from milepost.scheduler.plans import Progress, SequencePlan, StepPlan, StepResult
from milepost.scheduler.queue import Queue
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.sharing import InFlight

MAX_OVERTAKEN = 256
"""Later requests that may be admitted past one that finds no room, before it holds the queue. A
step without any prefill counts like one: the machine could have computed the request's prompt.
With fewer, conversations that don't fit together take turns too fast to reuse much; none waits
longer for it at the worst (docs/simulator.md, patience).
"""

_UNKNOWN = array("I", (0,))


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_waits: int = 0
    """Times that a request waited a step for a prefix that another one was computing."""
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Scheduler:
    """`max_num_batched_tokens` is at least one grid step, so that every chunk can make progress."""

    def __init__(self, cache: Memory, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = Queue(cache)
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._requests: dict[str, Request] = {}
        self._in_flight = InFlight()
        self._ahead: StepPlan | None = None
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError if the pool could never hold it all."""
        longest = request.num_tokens + request.max_tokens
        capacity = self.cache.capacity
        if longest > capacity:
            raise InvalidRequestError(
                f"prompt of {request.num_tokens} tokens plus max_tokens={request.max_tokens} needs "
                f"{longest} tokens of KV, the pool holds {capacity}: shorten the prompt, lower "
                "max_tokens or raise num_pages"
            )
        assert request.id not in self._requests, f"request id {request.id!r} is in use"
        request.arrival = self._num_added
        self._num_added += 1
        self._requests[request.id] = request
        self.waiting.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request from outside (stop string, abort) between steps; None if it is over
        already.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    # --- plan -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step; empty if nothing can run."""
        step = _Step(budget=self.max_num_batched_tokens)
        num_preemptions = self.stats.num_preemptions
        for request in sorted(self.running, key=lambda r: _num_left(r) > 1):
            self._plan_running(step, request)
        if self.stats.num_preemptions == num_preemptions or not step.num_tokens:
            self._plan_waiting(step)
        plans = [self._sequence_plan(request, n) for request, n in step.num_tokens.items()]
        plans.sort(key=_place_in_batch)
        return StepPlan(sequences=tuple(plans), moves=self.cache.take_moves() if plans else ())

    def _plan_running(self, step: _Step, request: Request) -> None:
        """Give a running request its tokens; zero of them keeps nobody behind it from running."""
        if request.lease is None:
            return  # preempted earlier in this step
        num_tokens = _chunk(request, step.budget)
        if not num_tokens:
            return
        while not self.cache.extend(request.lease, len(request.chain)):
            victim = max(self.running, key=lambda r: r.rank)
            step.remove(victim)
            self._preempt(victim)
            if victim is request:
                return
        step.give(request, num_tokens)

    def _plan_waiting(self, step: _Step) -> None:
        """Admit waiting requests in order while budget, seats and memory last."""
        blocked: list[Request] = []
        num_passed_over = 0
        for request in self.waiting:
            if len(self.running) >= self.max_num_seqs:
                return
            if blocked and blocked[0].num_overtaken >= MAX_OVERTAKEN:
                return
            if step.budget < min(GRID, self.waiting.num_left(request)):
                # Admitted, it would hold memory and compute next to nothing.
                if self.waiting.looks(request):
                    self._waits_for_prefix(request, self.cache.match(request.chain))
                num_passed_over += 1
                if num_passed_over >= self.max_num_seqs:
                    break
                continue
            if self.running and self.waiting.is_blocked(request):
                blocked.append(request)
                continue
            match = self.cache.match(request.chain)
            if self._waits_for_prefix(request, match):
                continue
            if self._admit(request, match):
                step.give(request, _chunk(request, step.budget))
                for other in blocked:
                    other.num_overtaken += 1
            else:
                self.waiting.block(request, match)
                blocked.append(request)
                if len(blocked) >= self.max_num_seqs:
                    break
        if blocked and not step.has_prefill:
            blocked[0].num_overtaken += 1
            blocked[0].blocked_at = None

    def _waits_for_prefix(self, request: Request, match: Match) -> bool:
        """Whether a running prefill computes this prefix; then it keeps its state there."""
        shared = self._in_flight.find(request, match)
        if shared is None:
            return False
        self.cache.add_junction(shared.lease, shared.position)
        self.stats.num_waits += 1
        return True

    def _admit(self, request: Request, match: Match) -> bool:
        lease = self._find_room(request, match)
        if lease is None:
            return False
        if request.report is None:
            request.report = lease.report
        request.lease = lease
        self.waiting.admit(request)
        self.running.append(request)
        if self.cache.mode == "auto":
            self._in_flight.claim(request)
        return True

    def _find_room(self, request: Request, match: Match) -> Lease | None:
        """A lease from the deepest resume; a request that is alone gets a cold one if need be."""
        first_time = request.report is None
        lease = self.cache.admit(
            request.chain,
            match,
            marks=request.marks,
            first_time=first_time,
            patience=self._patience(request),
        )
        if lease is None and not self.running:
            match = self.cache.match(request.chain, limit=0)
            lease = self.cache.admit(
                request.chain, match, marks=request.marks, first_time=first_time
            )
            assert lease is not None, "a request that `add` took fits the pool when it is alone"
        return lease

    def _patience(self, request: Request) -> int:
        """Requests that may yet go first, so that what they need is not evicted for this one. None
        if nothing else runs, it has run before, or something less urgent does.
        """
        if not self.running or request.num_preemptions:
            return 0
        if any(other.priority > request.priority for other in self.running):
            return 0
        return max(MAX_OVERTAKEN - request.num_overtaken, 0)

    def _preempt(self, request: Request) -> None:
        """Turn the request's live state into a checkpoint and queue it again."""
        self._give_up(request, Kind.PREEMPTED)
        self.waiting.add(request)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _give_up(self, request: Request, kind: Kind | None) -> None:
        """Take what a running request holds; with a `kind`, its state becomes a checkpoint."""
        assert request.lease is not None
        self._in_flight.drop(request)
        self.cache.release(request.lease, kind)
        request.lease = None
        self.running.remove(request)

    def _sequence_plan(self, request: Request, num_tokens: int) -> SequencePlan:
        lease, chain = request.lease, request.chain
        assert lease is not None
        start = lease.position
        end = start + num_tokens
        return SequencePlan(
            request=request,
            tokens=chain.tokens[start:end],
            start=start,
            page_table=lease.page_table,
            write_from=lease.write_from,
            slot_in=lease.slot_in,
            slot_out=lease.slot_out,
            exports=tuple(self.cache.take_exports(lease, end)),
            page_copy=lease.page_copy,
            samples=end == len(chain),
        )

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step behind `plan`, which is still running: its requests decode once more.

        None where more is to be decided than that (a prefill under way, a request to admit, memory
        to be found), or nothing is left to decode. A request that turns out to have ended in `plan`
        has then consumed one token more than needed, its last.
        """
        going_on = [s for s in plan.sequences if _goes_on(s.request)]
        if not going_on or not self._is_decided(plan, len(going_on)):
            return None
        for sequence in going_on:
            assert sequence.request.lease is not None
            if not self.cache.extend(sequence.request.lease, sequence.end + 1):
                return None
        sequences = tuple(_decode_ahead(s) for s in going_on)
        self._ahead = StepPlan(sequences=sequences, moves=self.cache.take_moves())
        return self._ahead

    def _is_decided(self, plan: StepPlan, num_going_on: int) -> bool:
        """Whether nothing but more decodes can follow the plan."""
        if self.cache.mode == "all":
            return False  # decodes export states, which are taken when the step is planned
        if len(plan.sequences) != len(self.running) or not all(s.samples for s in plan.sequences):
            return False
        return not self.waiting or num_going_on >= self.max_num_seqs

    # --- outcome ----------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Take the outcome of a step: commit what was computed, append tokens, end what is over."""
        self.stats.num_steps += 1
        if plan is self._ahead:
            self._ahead = None
        progress = []
        for sequence in plan.sequences:
            request = sequence.request
            assert request.lease is not None
            self._count(sequence)
            self.cache.commit(request.lease, sequence.end, result.written)
            self._in_flight.settle(request)
            if request.finish_reason is not None:
                self._leave(request)
            elif sequence.samples:
                progress.append(self._append(request, result.tokens[request.id]))
        return progress

    def retract(self, plan: StepPlan) -> None:
        """Take back a planned step that was cut short: its requests give up their live states,
        which may be half written, and wait to be admitted again. A step that follows it is taken
        back with it.

        If pages were to be moved, nobody knows which have been: then no request goes on, and
        nothing stays cached.
        """
        moves = plan.moves or (self._ahead is not None and self._ahead.moves)
        self._ahead = None
        cut_short = [sequence.request for sequence in plan.sequences]
        for request in self.running.copy() if moves else cut_short:
            self._give_up(request, None)
            if request.finish_reason is None:
                self.waiting.add(request)
        if moves:
            is_reset = self.cache.reset()
            assert is_reset, "no request runs"

    def _append(self, request: Request, token: int) -> Progress:
        request.chain.append(token)
        reason = request.end_after(token)
        if reason is not None:
            self._end(request, reason)
        return Progress(request=request, token=token, finish_reason=reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        if request.lease is None:
            self.waiting.remove(request)
        elif not self._runs_ahead(request):
            self._leave(request)

    def _runs_ahead(self, request: Request) -> bool:
        """Whether a further step of the request is planned: what it holds is in use until then."""
        return self._ahead is not None and any(s.request is request for s in self._ahead.sequences)

    def _leave(self, request: Request) -> None:
        """Keep the state where the answer ended."""
        self._give_up(request, Kind.ANSWER_END if self.cache.mode == "auto" else None)

    def _count(self, sequence: SequencePlan) -> None:
        if sequence.start >= sequence.request.num_prompt_tokens:
            self.stats.decode_tokens += len(sequence.tokens)
        else:
            self.stats.prefill_tokens += len(sequence.tokens)


class _Step:
    """Tokens given out so far in the step that is being planned."""

    __slots__ = ("budget", "num_tokens")

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.num_tokens: dict[Request, int] = {}

    @property
    def has_prefill(self) -> bool:
        return any(num_tokens > 1 for num_tokens in self.num_tokens.values())

    def give(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            self.num_tokens[request] = num_tokens
            self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request, 0)


def _num_left(request: Request) -> int:
    """Tokens that a running request has yet to consume; one while it decodes."""
    assert request.lease is not None
    return len(request.chain) - request.lease.position


def _place_in_batch(plan: SequencePlan) -> int:
    """Decodes first, by slot: states that lie side by side need not be gathered."""
    return plan.slot_out if plan.is_decode else sys.maxsize


def _goes_on(request: Request) -> bool:
    """Whether the answer may have tokens behind the one that is being sampled."""
    return request.finish_reason is None and request.num_output_tokens + 1 < request.max_tokens


def _decode_ahead(before: SequencePlan) -> SequencePlan:
    """The decode behind a step that samples."""
    return SequencePlan(
        request=before.request,
        tokens=_UNKNOWN,
        start=before.end,
        page_table=before.page_table,
        write_from=before.write_from,
        slot_in=before.slot_out,
        slot_out=before.slot_out,
        exports=(),
        page_copy=None,
        samples=True,
        is_ahead=True,
    )


def _chunk(request: Request, budget: int) -> int:
    """Tokens of the request's next chunk: all that is left, or up to a grid position."""
    left = _num_left(request)
    if left <= budget:
        return left
    start = len(request.chain) - left
    return max(floor(start + budget) - start, 0)
