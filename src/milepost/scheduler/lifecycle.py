"""Takes requests from `add` to their end: into the queue, out of memory, and out of the scheduler.

A finished request keeps its memory while a step in flight computes for it and while something is
loaded into it. If states are kept, it also keeps its memory for one more step, which folds its last
tokens into its state.
"""

from __future__ import annotations

from milepost.cache.placement import Kind
from milepost.errors import InvalidRequestError
from milepost.scheduler.admission import Admission
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.planner import Planner
from milepost.scheduler.queue import Queue
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.stats import SchedulerStats


class Lifecycle:
    """The requests that were added, by number, until they are finished and their memory
    is freed."""

    def __init__(
        self,
        cache: PrefixMemory,
        waiting: Queue,
        running: list[Request],
        admission: Admission,
        planner: Planner,
        stats: SchedulerStats,
    ) -> None:
        self.num_live = 0
        """Number of unfinished requests."""
        self._num_added = 0
        self._requests: dict[int, Request] = {}
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._planner = planner
        self._stats = stats

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.number) is request

    def add(self, request: Request) -> None:
        """Numbers a new request and queues it. Raises InvalidRequestError for one that is larger
        than the whole pool."""
        longest = request.num_tokens + request.max_tokens
        capacity = self._cache.capacity
        if longest > capacity:
            raise InvalidRequestError(
                f"prompt of {request.num_tokens} tokens plus max_tokens={request.max_tokens} needs "
                f"{longest} tokens of KV, the pool holds {capacity}: shorten the prompt, lower "
                "max_tokens or raise num_pages"
            )
        request.number = self._num_added
        self._queue(request)
        self._num_added += 1
        self.num_live += 1
        self._requests[request.number] = request

    def finish_load(self, request: Request) -> None:
        """Gives a request whose load is over a place in the next step, unless the request is
        finished."""
        assert request.allocation is not None
        if request.report is None:
            request.report = request.allocation.report
        self._admission.pending.settle(request)
        if request.finish_reason is not None:
            self._remove(request, None)

    def preempt_youngest(self) -> None:
        """Preempts the running request that is served last, among those with tokens left to
        compute."""
        self.preempt(max(filter(_may_be_preempted, self._running), key=lambda r: r.rank))

    def preempt(self, request: Request) -> None:
        """Preempts a running request: its live state becomes a checkpoint, and it is
        queued again."""
        assert request.finish_reason is None, "F5: a request that is over never waits again"
        self._release(request, Kind.PREEMPTED)
        self._queue(request)
        request.num_preemptions += 1
        self._stats.num_preemptions += 1

    def take_back(self, request: Request) -> None:
        """Frees a running request's memory, whose contents may be incomplete, and queues the
        request again unless it is finished."""
        if request.finish_reason is not None:
            self._remove(request, None)
        else:
            self._release(request, None)
            self._queue(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request. It is retired at once, or when nothing uses its memory any more."""
        request.finish_reason = reason
        self.num_live -= 1
        if request.allocation is None:
            self._waiting.remove(request)
            del self._requests[request.number]
        elif request.is_loading:
            pass  # its memory is being written to
        elif request.is_in_flight:  # its memory is in use until then
            self._admission.pending.leave(request)
        else:
            self.retire(request)

    def retire(self, request: Request) -> None:
        """Frees what a finished request holds, and keeps its state at the end of the answer. If
        tokens have yet to be folded into that state, the request first waits for a step that folds
        them."""
        allocation = request.allocation
        assert allocation is not None
        is_shared = allocation.committed <= request.chain.shared_end
        keeps_end = self._cache.mode == "auto" and is_shared
        folding = self._planner.folding
        if keeps_end and allocation.num_unfolded and request not in folding:
            folding[request] = None
            self._admission.pending.leave(request)
            return
        self._remove(request, Kind.ANSWER_END if keeps_end else None)

    def _queue(self, request: Request) -> None:
        request.queued_s = self._admission.now_s
        self._waiting.add(request)

    def _remove(self, request: Request, kind: Kind | None) -> None:
        self._release(request, kind)
        del self._requests[request.number]

    def _release(self, request: Request, kind: Kind | None) -> None:
        """Frees a running request's memory; if `kind` is given, its state becomes a checkpoint."""
        assert request.allocation is not None
        self._admission.pending.drop(request)
        self._cache.release(request.allocation, kind)
        request.allocation = None
        request.num_planned_pages = request.num_planned_windows = 0
        self._planner.ended.append(request.number)
        self._planner.folding.pop(request, None)
        self._running.remove(request)


def _may_be_preempted(request: Request) -> bool:
    """Whether a running request still has tokens to compute, and nothing else writes to
    its memory."""
    return request.finish_reason is None and not request.is_loading
