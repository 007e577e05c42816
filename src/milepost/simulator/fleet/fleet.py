"""The virtual-time loop: a trace through engines with the real scheduler and cache, and a cost
model in place of a model. Arrivals are routed, and each engine runs its own steps.

Engines may be of one kind, or some may only prefill and the others decode. A request is then sent
to an engine that prefills all but the prompt's last token, and after that to one that decodes and
reads what it lacks. The engine that decoded an answer has the state at its end; the next turn's
prefill reads it from there if it is deeper than its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from milepost.cache import Cache
from milepost.cache.allocation import Loan
from milepost.errors import InvalidRequestError, QueueWaitError
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.request import FinishReason, Progress, Request
from milepost.simulator.chain import TraceChain
from milepost.simulator.clients import Clients, Goodput, Patience
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet.engine import FleetEngine, Shape
from milepost.simulator.fleet.routing import EnginePool
from milepost.simulator.tiers import TierSizes
from milepost.simulator.trace import Trace


@dataclass(slots=True, kw_only=True)
class FleetRun:
    """Outcome of one run."""

    engines: Sequence[FleetEngine]
    asked: Goodput
    queries: int = 0
    """Prompt tokens of the requests that engines admitted, and of those they refused."""
    hits: int = 0
    """Prompt tokens that no engine computed for this request."""
    num_refused: int = 0
    """Requests that no engine could ever hold."""
    refused_tokens: int = 0
    """Prompt tokens of those requests."""
    moved_bytes: int = 0
    """Bytes that engines read from each other."""
    busiest: float = 0.0
    """Time of the busiest engine's steps relative to the mean."""
    busy_s: float = 0.0
    """Time of all engines' steps."""
    saved_s: float = 0.0
    """Additional time that prefilling the hits would have taken."""
    end_s: float = 0.0
    """Time at which the last step ended."""

    @property
    def only(self) -> FleetEngine:
        """The engine of a fleet of one."""
        (engine,) = self.engines
        return engine

    @property
    def ttft_s(self) -> list[float]:
        """Times to first token, in order of the tokens."""
        return self.asked.ttft_s


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
    """One trace through one fleet; `make_cache` makes the memory of each engine. An engine that is
    alone may have any memory that a scheduler can run in."""

    def __init__(
        self,
        trace: Trace,
        make_cache: Callable[[], PrefixMemory],
        cost: CostModel,
        shape: Shape,
        *,
        routing: str = "round-robin",
        closed: bool,
        tiers: TierSizes | None = None,
        patience: Patience | None = None,
    ) -> None:
        engines = [
            FleetEngine(
                number,
                make_cache(),
                cost,
                limits=shape.limits,
                bytes_per_s=shape.bytes_per_s if shape.num_prefill else None,
                tiers=tiers,
            )
            for number in range(shape.num_engines)
        ]
        self.engines = engines
        self._front = EnginePool(engines[: shape.num_prefill] or engines, routing)
        decoding = engines[shape.num_prefill :]
        self._back = EnginePool(decoding, routing) if shape.num_prefill else None
        self._trace, self._page_size, self._cost = trace, trace.page_size, cost
        self._digests = trace.digests()
        self._clients = Clients(trace, closed=closed, patience=patience)
        self._sent: dict[tuple[FleetEngine, int], _Sent] = {}
        """Requests under way, by engine and the scheduler's number."""
        self._at: dict[int, _Sent] = {}
        """Requests under way, by their number in the trace."""
        self._decoded: dict[object, FleetEngine] = {}
        """The engine that decoded each conversation's last answer."""
        self._wakes: list[tuple[float, int]] = []
        """A heap of times and engines. Only an engine's earliest time counts."""
        self._wake_s = dict.fromkeys(range(shape.num_engines), inf)
        """The earliest time at which each engine is to run."""
        self.now_s = 0.0
        self._num_done = 0
        self._run = FleetRun(engines=engines, asked=self._clients.asked)

    def run(self, on_done: Callable[[int], None] | None = None) -> FleetRun:
        """Runs everything; `on_done` is told how many requests are over."""
        while True:
            wake_s = self._wakes[0][0] if self._wakes else inf
            self.now_s = min(self._clients.next_s, wake_s)
            if self.now_s == inf:
                return self._finished()
            for number in self._clients.timed_out(self.now_s):
                self._abort(number)
            for number in self._clients.due(self.now_s):
                self._send(number)
            while self._wakes and self._wakes[0][0] <= self.now_s:
                wake_s, at = heapq.heappop(self._wakes)
                if wake_s == self._wake_s[at]:
                    self._wake_s[at] = inf
                    self._wake(at)
            if on_done is not None:
                on_done(self._num_done)

    def _finished(self) -> FleetRun:
        run = self._run
        assert not any(engine.is_stuck for engine in self.engines), "they wait for each other"
        for engine in self._front.engines:
            run.queries += engine.cache.stats.queries
            run.hits += engine.cache.stats.hits
        run.queries += run.refused_tokens
        busy = [engine.busy_s for engine in self.engines]
        run.busiest = max(busy) * len(busy) / sum(busy) if any(busy) else 0.0
        run.busy_s, run.saved_s = sum(busy), sum(engine.saved_s for engine in self.engines)
        links = (engine.transfers for engine in self.engines)
        run.moved_bytes = sum(link.num_bytes for link in links if link is not None)
        return run

    def _wake(self, at: int) -> None:
        engine = self.engines[at]
        for progress in engine.run(self.now_s):
            self._progress(engine, progress)
            self._run.end_s = self.now_s
        for request, error in engine.scheduler.take_late():
            if request.finish_reason is None:
                number = self._sent[engine, request.number].number
                self._abort(number)
                self._clients.refused(number, self.now_s, error.retry_after_s)
        self._push(engine)

    def _push(self, engine: FleetEngine, now_s: float | None = None) -> None:
        """Has an engine run at its next work, or now."""
        next_s = engine.next_s if now_s is None else now_s
        if next_s < self._wake_s[engine.number]:
            self._wake_s[engine.number] = next_s
            heapq.heappush(self._wakes, (next_s, engine.number))

    # --- a request's way --------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        """Sends a request to an engine that prefills it, and decodes it if no other does."""
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
        """Sends a prefilled request to an engine that decodes it."""
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
        except QueueWaitError as error:
            self._end(sent)
            self._clients.refused(number, self.now_s, error.retry_after_s)
            return None
        except InvalidRequestError:
            self._end(sent)
            self._run.num_refused += 1
            self._run.refused_tokens += asked.input_length
            self._over(number)
            return None
        self._sent[engine, request.number] = self._at[number] = sent
        self._push(engine, self.now_s)
        return sent

    def _lend(self, lender: FleetEngine, sent: _Sent) -> None:
        """Lets a request read another engine's pages and state, if they are deeper than its own."""
        borrower, chain = sent.pool.engines[sent.at], sent.request.chain
        if lender is borrower:
            return
        cache, transfers = lender.cache, borrower.transfers
        assert isinstance(cache, Cache)
        assert transfers is not None
        loan = cache.lend(chain)
        if loan is not None:
            transfers.want(sent.request, loan, partial(self._take_back, lender, cache, loan))

    def _take_back(self, lender: FleetEngine, cache: Cache, loan: Loan) -> None:
        """Ends a loan, and wakes a lender that had no room before."""
        cache.take_back(loan)
        if lender.is_stuck:
            self._push(lender, self.now_s)

    def _progress(self, engine: FleetEngine, progress: Progress) -> None:
        request = progress.request
        sent = self._sent[engine, request.number]
        if not sent.has_begun and request.num_output_tokens:
            self._begun(sent)
            assert request.report is not None, "a request with a token was admitted"
            if not sent.prefills:
                self._clients.begun(sent.number, self.now_s)
            if sent.pool is self._front:
                reused = request.report.state_length
                engine.saved_s += self._cost.prefill_s(0, reused)
                engine.saved_s += self._cost.encode_s(request.chain.pictures, reused)
        if progress.finish_reason is None:
            return
        self._end(sent)
        if sent.prefills:
            self._go_on(sent, engine)
        else:
            self._over(sent.number)

    def _begun(self, sent: _Sent) -> None:
        sent.has_begun = True
        sent.pool.traffic.num_prefilling[sent.at] -= sent.expected

    def _end(self, sent: _Sent) -> None:
        """Forgets a request at its engine."""
        if not sent.has_begun:
            self._begun(sent)
        self._sent.pop((sent.pool.engines[sent.at], sent.request.number), None)
        self._at.pop(sent.number, None)
        sent.pool.traffic.num_requests[sent.at] -= 1

    def _abort(self, number: int) -> None:
        """Ends a request whose client has given up, or is told to come again."""
        sent = self._at.get(number)
        if sent is None:
            return
        self._end(sent)
        engine = sent.pool.engines[sent.at]
        engine.scheduler.finish(sent.request, FinishReason.ABORT)
        self._push(engine, self.now_s)

    def _over(self, number: int) -> None:
        self._num_done += 1
        self._clients.done(number, self.now_s)
