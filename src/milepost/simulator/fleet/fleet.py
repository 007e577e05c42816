"""A trace through many engines: arrivals are routed, each engine runs its own steps, and where some
only prefill, another one continues with what they lend.

With separate pools a request is sent to an engine that prefills all but the prompt's last token,
and then to one that decodes, which reads what it lacks. The end of the previous answer is where it
was decoded; the next turn's prefill reads it from there if that is deeper.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from milepost.cache import Cache
from milepost.cache.allocation import Loan
from milepost.errors import InvalidRequestError
from milepost.scheduler.request import Progress, Request
from milepost.simulator.chain import TraceChain
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet.engine import FleetEngine
from milepost.simulator.fleet.routing import ROUTINGS, Pages, Routing, Traffic
from milepost.simulator.loop import Arrivals
from milepost.simulator.tiers import TierSizes
from milepost.simulator.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many engines, and what each may do at once."""

    num_engines: int
    num_prefill: int = 0
    """Of these, those that only prefill; the others then only decode."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    bytes_per_s: float = 50e9
    """Of each engine's link, for what it reads from others."""


@dataclass(slots=True, kw_only=True)
class FleetRun:
    """What came of one run."""

    queries: int = 0
    """Prompt tokens."""
    hits: int = 0
    """Those that nobody computed for this request."""
    ttft_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    moved_bytes: int = 0
    """Between engines."""
    busiest: float = 0.0
    """What the busiest engine's steps took, in means of all."""
    end_s: float = 0.0


class EnginePool:
    """Engines that requests are sent to by one routing."""

    def __init__(self, engines: Sequence[FleetEngine], routing: str) -> None:
        self.engines = engines
        self.traffic, pages = Traffic(len(engines)), Pages(len(engines))
        if routing in ("events", "prefix"):
            for number, engine in enumerate(engines):
                engine.scheduler.outside.add_listener(pages.listener(number))
        self._pages = pages
        self._routing: Routing = ROUTINGS[routing](self.traffic, pages)

    def send(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> tuple[int, int]:
        """The engine that a request is sent to, and the tokens that it is expected to compute."""
        at, traffic = self._routing.choose(asked, keys, page_size), self.traffic
        hit = self._pages.depths(keys).get(at, 0) * page_size
        expected = max(asked.input_length - hit, 1)
        traffic.num_requests[at] += 1
        traffic.num_sent[at] += 1
        traffic.num_prefilling[at] += expected
        return at, expected


@dataclass(slots=True, kw_only=True, eq=False)
class _Sent:
    """A request at an engine of a pool."""

    number: int
    request: Request
    pool: EnginePool
    at: int
    expected: int
    prefills: bool
    has_begun: bool = False
    """Whether its first token has come."""


class Fleet:
    """One trace through one fleet. `make_cache` makes the memory of each engine."""

    def __init__(
        self,
        trace: Trace,
        make_cache: Callable[[], Cache],
        cost: CostModel,
        shape: Shape,
        *,
        routing: str,
        closed: bool,
        tiers: TierSizes | None = None,
    ) -> None:
        engines = [
            FleetEngine(
                number,
                make_cache(),
                cost,
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                bytes_per_s=shape.bytes_per_s,
                tiers=tiers,
            )
            for number in range(shape.num_engines)
        ]
        self._engines = engines
        self._front = EnginePool(engines[: shape.num_prefill] or engines, routing)
        self._back = (
            EnginePool(engines[shape.num_prefill :], routing) if shape.num_prefill else None
        )
        self._trace, self._page_size = trace, trace.page_size
        self._digests = trace.digests()
        self._arrivals = Arrivals(trace, closed=closed)
        self._arrived_s: dict[int, float] = {}
        self._sent: dict[tuple[FleetEngine, int], _Sent] = {}
        """By engine and the scheduler's number."""
        self._decoded: dict[object, FleetEngine] = {}
        """Where a conversation's last answer was decoded."""
        self._wakes: list[tuple[float, int]] = []
        self._now_s = 0.0
        self._num_done = 0
        self._run = FleetRun()

    def run(self, on_done: Callable[[int], None] | None = None) -> FleetRun:
        """Run everything; `on_done` is told how many requests are over."""
        while True:
            wake_s = self._wakes[0][0] if self._wakes else float("inf")
            self._now_s = min(self._arrivals.next_s, wake_s)
            if self._now_s == float("inf"):
                return self._finished()
            for arrived_s, number in self._arrivals.due(self._now_s):
                self._arrived_s[number] = arrived_s
                self._send(number)
            while self._wakes and self._wakes[0][0] <= self._now_s:
                self._wake(heapq.heappop(self._wakes)[1])
            if on_done is not None:
                on_done(self._num_done)

    def _finished(self) -> FleetRun:
        run = self._run
        assert not any(engine.is_stuck for engine in self._engines), "they wait for each other"
        for engine in self._front.engines:
            run.queries += engine.cache.stats.queries
            run.hits += engine.cache.stats.hits
        busy = [engine.busy_s for engine in self._engines]
        run.busiest = max(busy) * len(busy) / sum(busy) if any(busy) else 0.0
        run.moved_bytes = sum(engine.transfers.num_bytes for engine in self._engines)
        return run

    def _wake(self, at: int) -> None:
        engine = self._engines[at]
        for progress in engine.run(self._now_s):
            self._progress(engine, progress)
            self._run.end_s = self._now_s
        self._push(engine)

    def _push(self, engine: FleetEngine, now_s: float | None = None) -> None:
        """Have an engine run when it has something to do, or now."""
        next_s = engine.next_s if now_s is None else now_s
        if next_s != float("inf"):
            heapq.heappush(self._wakes, (next_s, engine.number))

    # --- a request's way --------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        """To whoever prefills it, and decodes it too where nobody else does."""
        asked = self._trace.requests[number]
        prefills = self._back is not None and asked.input_length > 1
        length = asked.input_length - prefills
        chain = TraceChain(asked, self._page_size, self._digests)
        if prefills:
            chain.tokens = range(length)  # type: ignore[assignment]
        max_tokens = 1 if prefills else asked.output_length
        sent = self._add(self._front, number, chain, max_tokens, prefills=prefills)
        if sent is None:
            return
        before = self._decoded.get(asked.thread) if prefills else None
        if before is not None:
            self._lend(before, sent)

    def _go_on(self, sent: _Sent, lender: FleetEngine) -> None:
        """What was prefilled is decoded elsewhere."""
        assert self._back is not None
        asked = self._trace.requests[sent.number]
        chain = TraceChain(asked, self._page_size, self._digests)
        after = self._add(self._back, sent.number, chain, asked.output_length, prefills=False)
        if after is not None:
            self._lend(lender, after)
            self._decoded[asked.thread] = self._back.engines[after.at]

    def _add(
        self, pool: EnginePool, number: int, chain: TraceChain, max_tokens: int, *, prefills: bool
    ) -> _Sent | None:
        asked = self._trace.requests[number]
        keys = [self._digests[id_] for id_ in asked.page_ids]
        at, expected = pool.send(asked, keys, self._page_size)
        engine = pool.engines[at]
        request = Request(id=str(number), chain=chain, max_tokens=max_tokens)
        sent = _Sent(
            number=number, request=request, pool=pool, at=at, expected=expected, prefills=prefills
        )
        try:
            engine.add(request)
        except InvalidRequestError:
            self._begun(sent)
            self._end(sent)
            self._run.num_refused += 1
            self._run.queries += asked.input_length
            self._over(number)
            return None
        self._sent[engine, request.number] = sent
        self._push(engine, self._now_s)
        return sent

    def _lend(self, lender: FleetEngine, sent: _Sent) -> None:
        """Let a request read what another engine has of it, if that is more than its own has."""
        borrower, chain = sent.pool.engines[sent.at], sent.request.chain
        if lender is borrower:
            return
        loan = lender.cache.lend(chain)
        if loan is not None:
            borrower.transfers.want(sent.request, loan, partial(self._take_back, lender, loan))

    def _take_back(self, lender: FleetEngine, loan: Loan) -> None:
        """Nobody reads on; the lender may have had room for nothing before."""
        lender.cache.take_back(loan)
        if lender.is_stuck:
            self._push(lender, self._now_s)

    def _progress(self, engine: FleetEngine, progress: Progress) -> None:
        request = progress.request
        sent = self._sent[engine, request.number]
        if not sent.has_begun and request.num_output_tokens:
            self._begun(sent)
            if not sent.prefills:
                self._run.ttft_s.append(self._now_s - self._arrived_s.pop(sent.number))
        if progress.finish_reason is None:
            return
        del self._sent[engine, request.number]
        self._end(sent)
        if sent.prefills:
            self._go_on(sent, engine)
        else:
            self._over(sent.number)

    def _begun(self, sent: _Sent) -> None:
        sent.has_begun = True
        sent.pool.traffic.num_prefilling[sent.at] -= sent.expected

    def _end(self, sent: _Sent) -> None:
        sent.pool.traffic.num_requests[sent.at] -= 1

    def _over(self, number: int) -> None:
        self._num_done += 1
        self._arrivals.done(number, self._now_s)
