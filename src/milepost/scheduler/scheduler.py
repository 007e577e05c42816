"""Continuous batching with chunked prefill under a token budget, over the prefix cache.

Owns the requests from `add` to their terminal event. Makes plans from facts; no tensors, no clock,
no I/O. One step: `schedule()` returns a plan, the caller runs it, and `update(plan, result)` takes
the result, or `roll_back(plan)` undoes the plan if it was cut short. Between `schedule` and
`update`, `follow(plan)` may plan one further step, whose result is taken after that of `plan`.

The planner decides who computes what in a step. If memory runs out, the youngest running request is
preempted; its state goes into the cache, so it hits when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from milepost.config import check_budget
from milepost.errors import QueueWaitError
from milepost.scheduler.admission import Admission
from milepost.scheduler.backlog import Backlog
from milepost.scheduler.encoders import PLAIN_COST, Encoders, TowerCost
from milepost.scheduler.lifecycle import Lifecycle
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.outside import Outside
from milepost.scheduler.planner import Planner
from milepost.scheduler.plans import SequencePlan, StepPlan, StepResult
from milepost.scheduler.queue import Queue
from milepost.scheduler.request import FinishReason, Progress, Request
from milepost.scheduler.stats import SchedulerStats


class Scheduler:
    """Plans the steps of an engine.

    If there is room, the page table of a request that samples covers `num_lookahead_tokens` more
    tokens than it has, for drafts that a head makes after the sampled token. With
    `max_queue_wait_s`, `check_wait` and `take_late` report requests that wait too long. Raises
    ConfigError for a budget too small for progress.
    """

    def __init__(
        self,
        cache: PrefixMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_lookahead_tokens: int = 0,
        encoder_cache_size: int = 0,
        tower_cost: TowerCost = PLAIN_COST,
        max_queue_wait_s: float | None = None,
    ) -> None:
        check_budget(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            grid=cache.grid,
        )
        self.cache = cache
        self.max_num_seqs, self.tower_cost = max_num_seqs, tower_cost
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = Queue(cache)
        self.running: list[Request] = []
        self.stats = stats = SchedulerStats()
        self.outside = Outside(cache)
        holds_back = max_queue_wait_s is None
        self._admission = Admission(
            cache, self.waiting, self.running, self.outside, stats, holds_back=holds_back
        )
        self._backlog = (
            Backlog(self.waiting, self._admission, self.stats, max_queue_wait_s)
            if max_queue_wait_s is not None
            else None
        )
        self._planner = Planner(
            cache,
            self.running,
            self._admission,
            self.outside,
            Encoders(encoder_cache_size, max_num_batched_tokens, cache.grid, stats, tower_cost),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        self._requests = Lifecycle(
            cache, self.waiting, self.running, self._admission, self._planner, self.stats
        )
        self._steps: deque[StepPlan] = deque()
        self._moves_beside = False
        """Whether copies planned beside the step in flight move pages."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests.num_live or self._planner.folding or self.num_loading)

    @property
    def only_folds(self) -> bool:
        """Whether the only work left is to fold the last tokens of finished answers into their
        states."""
        return bool(self._planner.folding) and not self._requests.num_live

    @property
    def num_loading(self) -> int:
        """Number of requests being loaded, including finished ones that are still written to."""
        return len(self.outside.loading)

    # --- outside the device -----------------------------------------------------------------------

    def plan_copies(self) -> StepPlan:
        """Plans a keeper's copies while no request runs and no step is in flight."""
        assert not self._steps, "F1: nothing is planned beside a step in flight"
        moves = self.cache.take_moves()
        return StepPlan(sequences=(), moves=moves, stores=self.outside.take_stores(len(moves)))

    def arrived(self, number: int) -> None:
        """Records that everything loaded for this request has arrived."""
        self._requests.finish_load(self.outside.arrived(number))

    def failed(self, number: int) -> None:
        """Records that a load has failed. The request computes the missing tokens."""
        self._requests.finish_load(self.outside.failed(number))

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError for one that is larger than the
        whole pool."""
        self._planner.encoders.check(request.chain.pictures)
        self._requests.add(request)
        if self._backlog is not None:
            self._backlog.add(request)

    def check_wait(self, request: Request) -> None:
        """Raises QueueWaitError for a request that would not begin within `max_queue_wait_s`."""
        if self._backlog is not None and self.waiting:
            request.queued_s = self._admission.now_s
            self._backlog.check(request, self.cache.match(request.chain))

    def take_late(self) -> list[tuple[Request, QueueWaitError]]:
        """Returns requests that have waited for longer than `max_queue_wait_s`, each once, with the
        errors for their clients. The caller ends them."""
        return self._backlog.take_late() if self._backlog is not None else []

    def request(self, number: int) -> Request:
        """Returns the request of this number, until the outcome of its plan is taken."""
        return self._requests[number]

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """Ends a request from outside (stop string, abort) between steps. Returns False if it is
        finished already, or was never added."""
        if request not in self._requests or request.finish_reason is not None:
            return False
        self._requests.end(request, reason)
        return True

    def propose(self, request: Request, drafts: Sequence[int]) -> None:
        """Sets the drafts that may follow the request's present tokens. Until it gets further
        tokens, the next step verifies as many as there are tokens and memory for.

        A step that verifies drafts computes them after the last token. Its result is the run of
        tokens that the model would have sampled one by one: the accepted drafts and one more. The
        state stays before the drafts; the next step folds in the accepted ones. Only the outcome
        says where that step begins, so `follow` plans none for this request, which is therefore in
        at most every other step. Other requests run ahead as usual.
        """
        request.drafts, request.drafts_from = tuple(drafts), request.num_tokens

    # --- plan -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step; the plan is empty if nothing can run."""
        assert not self._steps, "F1: only `follow` plans a step after one in flight"
        if not self.has_work:
            return StepPlan(sequences=())
        num_preemptions = self.stats.num_preemptions
        continuing = self._planner.continuing()
        for request in list(filter(_grows, continuing)):
            self._make_room(request)
        is_short = self.running and self.stats.num_preemptions > num_preemptions
        continuing = [request for request in continuing if request.allocation is not None]
        return self._launched(self._planner.plan(continuing, 0 if is_short else self.max_num_seqs))

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step after `plan`, which is still running, for its requests and for others that
        are known to have tokens, a seat and memory. Returns None if memory must be found for a
        decode, if decodes keep states (mode `all`), or if nothing is left to do. A request that
        turns out to have ended in `plan` has then consumed one token too many, its last."""
        assert len(self._steps) == 1, "F2: one step is planned ahead, not two"
        assert plan is self._steps[0], "F2: it follows the one in flight"
        if self.cache.mode == "all" or (self.cache.mode == "align" and self.waiting):
            return None  # requests that begin now would not see what `plan` publishes
        continuing = self._planner.continuing()
        if not all(map(self._planner.has_room, filter(_grows, continuing))):
            return None
        following = self._launched(self._planner.plan(continuing, self.max_num_seqs))
        return following if following.sequences or following.only_copies else None

    def _make_room(self, request: Request) -> None:
        """Preempts the youngest requests, possibly this one, until there is memory for its next
        tokens. Finished requests keep their memory for the step that folds in their last tokens."""
        while not self._planner.has_room(request):
            self._requests.preempt_youngest()

    def _launched(self, plan: StepPlan) -> StepPlan:
        """Records that a plan is now running, and returns it."""
        if plan.sequences:
            self._steps.append(plan)
        elif self._steps and plan.moves:
            self._moves_beside = True
        return plan

    # --- outcome ----------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Does the work of `update` that does not depend on the outcome, while the step still runs:
        computes the digests of pages that it fills."""
        for sequence in reversed(plan.sequences):
            if sequence.is_decode:
                break  # the rest are decodes, which seldom fill a page
            chain = self._requests[sequence.number].chain
            chain.digests(sequence.end // chain.page_size)

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Takes the outcome of a step: commits what was computed, appends tokens, and ends finished
        requests."""
        self.stats.num_steps += 1
        num_tokens = sum(s.num_tokens for s in plan.sequences if not s.is_decode)
        self._admission.ran(num_tokens, result.seconds)
        if self._backlog is not None:
            self._backlog.ran(result.seconds)
        if plan.sequences:
            first = self._steps.popleft()
            assert plan is first, "F3: outcomes are taken in the order of the steps"
            self._moves_beside = False
        num_before = self.stats.num_computed_tokens
        progress = []
        for sequence in plan.sequences:
            request = self._requests[sequence.number]
            was_over = request.finish_reason is not None
            tokens: list[int] = []
            reason: FinishReason | None = None
            if sequence.samples and not was_over:
                run = result.tokens[sequence.number]
                assert run, "R1: a sequence that samples has a token"
                num_tokens, reason = request.cut(run)
                tokens = run[:num_tokens]
                request.extend(tokens)
            self._commit(request, sequence, result)
            if request.is_computed and not was_over:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._requests.end(request, reason)
            elif was_over and not request.is_in_flight:
                self._requests.retire(request)
            if tokens:
                progress.append(Progress(request=request, tokens=tokens, finish_reason=reason))
        if plan.sequences:
            self.stats.stepped(self.stats.num_computed_tokens - num_before)
        return progress

    def _commit(self, request: Request, sequence: SequencePlan, result: StepResult) -> None:
        """Commits what a step has computed; of the drafts, only the accepted ones."""
        assert request.allocation is not None
        position = sequence.end
        if sequence.num_drafts and sequence.samples:
            num_tokens = len(result.tokens[sequence.number])
            position = min(sequence.start + num_tokens, request.num_tokens)
            self.stats.verified(sequence.num_drafts, num_tokens - 1)
        if sequence.start >= request.num_prompt_tokens:
            self.stats.decode_tokens += position - sequence.start
        else:
            self.stats.prefill_tokens += position - sequence.start
        self.cache.commit(request.allocation, position, result.written)
        self._admission.pending.settle(request)

    def roll_back(self, plan: StepPlan) -> None:
        """Undoes a planned step that was cut short, and the step after it. Its requests give up
        their live states, which may be incomplete, and wait to be admitted again. If the plan moved
        pages, it is unknown which were moved: then all requests are rolled back, and the cache is
        emptied."""
        assert not self._steps or self._steps[0] is plan, "F3: the first step in flight goes first"
        steps = self._steps if self._steps else (plan,)
        moves = self._moves_beside or any(step.moves for step in steps)
        self._moves_beside = False
        assert not (moves and self.num_loading), "F4: loads are over before a step is taken back"
        for step in steps:
            # The runner may or may not have got this far, so both are repeated.
            self._planner.ended.extend(step.ended)
            self._planner.encoders.roll_back(step)
        self._steps.clear()
        for request in [one for one in self.running if moves or one.is_in_flight]:
            self._requests.take_back(request)
        if moves:
            is_reset = self.cache.reset()
            assert is_reset, "no request runs"


def _grows(request: Request) -> bool:
    """Whether a request's next tokens may exceed its page table."""
    return request.num_output_tokens > 0 or request.num_left == 1
