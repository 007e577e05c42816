"""Plans one step: which request computes how many tokens, as data.

Order within a step: decodes, then running prefills and waiting requests by priority, running before
waiting. But half of the tokens go first to prompts that need few. A chunk that is not a prompt's
last one ends on the grid. Uses only free memory: preemption is up to the scheduler, which also
keeps track of the steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from milepost.cache.allocation import State
from milepost.scheduler.admission import Admission
from milepost.scheduler.admission_round import AdmissionRound
from milepost.scheduler.budget import Budget, max_num_exports
from milepost.scheduler.encoders import Encoders
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.outside import Outside
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.sequences import place_in_batch, plan_sequence

FEW = 4
"""A prompt is short if it needs at most max_num_batched_tokens / FEW tokens."""


class Planner:
    """Shares the tokens of a step among the `running` requests and those that
    `admission` admits."""

    def __init__(
        self,
        cache: PrefixMemory,
        running: list[Request],
        admission: Admission,
        outside: Outside,
        encoders: Encoders,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_lookahead_tokens: int,
    ) -> None:
        self.ended: list[int] = []
        """Numbers of requests whose page tables the runner drops with the next plan."""
        self.folding: dict[Request, None] = {}
        """Finished requests with tokens that a step must still fold into their states."""
        self._cache = cache
        self._running = running
        self._admission = admission
        self._outside = outside
        self.encoders = encoders
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._max_num_exports = max_num_exports(max_num_seqs, max_num_batched_tokens, cache.grid)

    def continuing(self) -> list[Request]:
        """Returns the requests that may have tokens in the next step."""
        return [request for request in self._running if request.goes_on]

    def has_room(self, request: Request) -> bool:
        """Whether there is memory for a request's next tokens. If so, it is allocated."""
        allocation = request.allocation
        return allocation is None or self._cache.extend(
            allocation, allocation.planned + request.num_left
        )

    def plan(self, continuing: Sequence[Request], max_num_seqs: int) -> StepPlan:
        """Plans a step for running requests that have room for their tokens, and for waiting ones,
        which are admitted while fewer than `max_num_seqs` run. The plan is empty if there is
        nothing to do."""
        budget = Budget(self._max_num_batched_tokens, self._cache.grid, self.encoders)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in continuing:
            (decodes if request.num_left == 1 else prefills).append(request)
        # Requests whose drafts are being verified must wait for that step's outcome.
        is_awaited = any(map(_is_decoding, self._running))
        turn = self._admission.open(max_num_seqs)
        budget.give_decodes(decodes)
        self.encoders.begin(has_decodes=is_awaited, num_left=budget.left)
        budget.charge_encoders()
        budget.give_starved(prefills)
        candidates = self._admission.candidates(turn)
        self._give_prefills(prefills, candidates, budget, turn)
        self._admission.close(budget, turn)
        budget.give_one_each(decodes)
        for request in decodes:
            if (request.drafts or request.most_replayed) and request in budget.given:
                self._give_drafts(request, budget)
        budget.note_idle(continuing)
        return self._build_plan(budget)

    def _give_prefills(
        self,
        prefills: Sequence[Request],
        candidates: Sequence[Request],
        budget: Budget,
        turn: AdmissionRound,
    ) -> None:
        """Gives prompts their chunks. Half of the tokens go first to prompts that need few, so that
        they don't wait for long ones. The rest is given in order of urgency. So is the last seat,
        or every seat once a request has waited for long."""
        if not prefills and not candidates:
            return  # most steps only decode
        running = sorted(prefills, key=lambda r: r.number)
        ordered = sorted([*running, *candidates], key=_order)
        reserved, considered = max(budget.left // 2, self._cache.grid), set[Request]()
        in_order = bool(candidates) and self._admission.has_waited_long(candidates[0])
        for request in self._shortest(ordered):
            if budget.left - self._admission.num_left(request) < reserved:
                break
            if request.allocation is None and (in_order or turn.num_seats == 1):
                continue
            considered.add(request)
            self._give_turn(request, budget, turn)
        for request in ordered:
            if request not in considered:
                self._give_turn(request, budget, turn)

    def _shortest(self, requests: Sequence[Request]) -> list[Request]:
        """Returns the most urgent requests with few tokens left, those with the fewest first."""
        most = self._max_num_batched_tokens // FEW
        num_left = self._admission.num_left
        found = [r for r in requests if r.priority == requests[0].priority and num_left(r) <= most]
        return sorted(found, key=lambda r: (num_left(r), r.number))

    def _give_turn(self, request: Request, budget: Budget, turn: AdmissionRound) -> None:
        runs = request.allocation is not None
        if runs or (not turn.is_over and self._admission.consider(request, budget, turn)):
            budget.give_chunk(request)

    def _give_drafts(self, request: Request, budget: Budget) -> None:
        """Gives a decode tokens to verify its drafts, at most as many as its answer may still have
        after the next token. A bitwise request that returns may instead get its known next tokens,
        which are computed again."""
        allocation = request.allocation
        assert allocation is not None
        is_ready = allocation.state is State.READY and not request.is_at_prompt
        if not is_ready or self._cache.mode == "all":
            return
        num_drafts = request.num_replayed
        if request.drafts_from == request.num_tokens == allocation.planned + 1:
            num_drafts = min(
                request.max_tokens - request.num_output_tokens - 1, len(request.drafts)
            )
        num_drafts = min(num_drafts, budget.left)
        if num_drafts > 0 and self._cache.extend(allocation, allocation.planned + 1 + num_drafts):
            budget.give_drafts(request, num_drafts)

    def _build_plan(self, budget: Budget) -> StepPlan:
        """Builds the plan of a step, including page moves, loads and stores."""
        sequences = [plan_sequence(self._cache, request, 0) for request in self.folding]
        self.folding.clear()
        num_exports = self._max_num_exports
        for request, num_tokens in budget.given.items():
            sequence = plan_sequence(
                self._cache,
                request,
                num_tokens,
                num_drafts=budget.num_drafts.get(request, 0),
                max_num_exports=num_exports,
                num_lookahead_tokens=self._num_lookahead_tokens,
            )
            sequences.append(sequence)
            num_exports -= len(sequence.exports)
        loads = self._outside.take_loads()
        pictures = self.encoders.take()
        if not (sequences or loads or any(pictures)):
            return StepPlan(sequences=())
        sequences.sort(key=place_in_batch)
        ended: tuple[int, ...] = ()
        if sequences:
            ended, self.ended = tuple(self.ended), []
        moves = self._cache.take_moves()
        return StepPlan(
            sequences=tuple(sequences),
            moves=moves,
            ended=ended,
            stores=self._outside.take_stores(len(moves)),
            loads=loads,
            drops=pictures.drops,
            encodes=pictures.encodes,
            encode_part=pictures.part,
        )


def _is_decoding(request: Request) -> bool:
    """Whether a request is decoding, and nothing but a step is needed for its next token."""
    is_loading = request.allocation is not None and request.allocation.is_loading
    return request.num_output_tokens > 0 and request.may_go_on and not is_loading


def _order(request: Request) -> tuple[int, bool]:
    """Sort key of a request: by priority, then running before waiting."""
    return request.priority, request.allocation is None
