"""Collects what the page shows of a running engine: its tree, its memory, its last minutes.

A snapshot is made in slices, a few between two steps, so that no step waits for it. Between
snapshots next to nothing is done: some numbers every two seconds in which there are steps, and
those of the last prompts. Positions and lengths are exported, never tokens, text or salts.

Running and waiting requests are summed over time, as the area below their curve. Two samples
therefore say how many there were on average between them, however far apart they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from milepost.cache.memory import Pool
from milepost.cache.tree import Node
from milepost.engine.facts import Facts, Watcher
from milepost.page.survey import PageRun, View, survey
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler

SAMPLE_S = 2.0
MAX_SAMPLES = 151
"""Number of samples: five minutes, with both ends."""
MAX_PROMPTS = 24
MAX_RUNNING = 512
"""Number of running requests that are shown, the oldest first; the others are only counted."""

SLICE_S = 0.002
"""Time between two steps that a survey may take; a slice that has begun is finished."""

_ENCODER = msgspec.json.Encoder()


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """A sample of the counters since the start."""

    at: float
    """Time of the record, in seconds of the monotonic clock; once sent, its age in seconds."""
    queries: int
    hits: int
    computed: int
    decoded: int
    running_s: float
    """Seconds that requests ran, summed over the requests."""
    waiting_s: float
    """Seconds that requests waited, summed over the requests."""


class Seen(msgspec.Struct, frozen=True):
    """The cached part that a prompt found when it was admitted."""

    id: str
    at: float
    """Time of the record, in seconds of the monotonic clock; once sent, its age in seconds."""
    num_tokens: int
    kv_length: int
    state_length: int
    reused: int
    lost: dict[str, int]
    hit: bytes | None
    """Digest of the last full page before the position that it resumed from."""


class Watch(Watcher):
    """Records what one scheduler and its cache do. The step loop tells it of each step."""

    def __init__(self, scheduler: Scheduler, facts: Facts) -> None:
        self._scheduler, self._cache = scheduler, scheduler.outside.cache
        self._facts = facts
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._seen: deque[Seen] = deque(maxlen=MAX_PROMPTS)
        self._noted_at: float | None = None
        self._counts = (0, 0)
        """Numbers of requests that have run and waited since `_noted_at`."""
        self._running_s = 0.0
        self._waiting_s = 0.0
        self._survey: Generator[None, None, View] | None = None
        self._running: list[tuple[Request, Node | None]] = []

    # --- what happens -----------------------------------------------------------------------------

    def note_time(self, now: float) -> None:
        """Records the time before a step, and keeps a sample if the last one is old enough."""
        self._pass_to(now)
        self._counts = self._current_counts()
        if not self._samples or now - self._samples[-1].at >= SAMPLE_S:
            self._samples.append(self._sample(now))

    def note_step(self, now: float, num_ended: int) -> None:
        """Records the end of a step, in which `num_ended` requests ended. They ran until now, and
        those that wait now waited throughout: arrivals are only read between steps."""
        num_running, num_waiting = self._current_counts()
        self._counts = num_running + num_ended, num_waiting
        self._pass_to(now)
        self._counts = num_running, num_waiting

    def note_rest(self, now: float) -> None:
        """Keeps a sample when the work ends, so that the work does not count in the pause after
        it."""
        self.note_time(now)
        last, sample = self._samples[-1], self._sample(now)
        if msgspec.structs.replace(last, at=now) == sample:
            return
        if len(self._samples) > 1 and now - self._samples[-2].at < 2 * SAMPLE_S:
            self._samples.pop()
        self._samples.append(sample)

    def note_admission(self, request: Request, now: float) -> None:
        """Records what a prompt found in the cache, once its first step has run."""
        report = request.report
        assert report is not None, "an admitted request has its report"
        depth = report.state_length // request.chain.page_size
        known = request.chain.known_digests()
        self._seen.append(
            Seen(
                id=request.id,
                at=now,
                num_tokens=report.prompt_tokens,
                kv_length=report.kv_length,
                state_length=report.state_length,
                reused=report.reused,
                lost={reason.value: num for reason, num in report.lost.items() if num},
                hit=known[depth - 1] if 0 < depth <= len(known) else None,
            )
        )

    # --- looks ------------------------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        return self._survey is not None

    def look(self) -> None:
        """Begins a survey, unless one is in progress."""
        if self._survey is None:
            running = self._scheduler.running[:MAX_RUNNING]
            self._running = [(request, self._node(request)) for request in running]
            nodes = self._cache.tree.nodes
            hits = [nodes.get(seen.hit) for seen in self._seen if seen.hit is not None]
            wanted = [node for _, node in self._running] + hits
            self._survey = survey(self._cache.tree, [n for n in wanted if n is not None])

    def go_on(self, clock: Callable[[], float]) -> bytes | None:
        """Continues the survey for some slices; returns it as JSON once it is complete."""
        if self._survey is None:
            return None
        start = clock()
        self.note_time(start)
        try:
            while clock() - start < SLICE_S:
                next(self._survey)
        except StopIteration as end:
            self._survey = None
            return _ENCODER.encode(self._state(end.value, start))
        return None

    def _node(self, request: Request) -> Node | None:
        """Returns the deepest node of a running request's path."""
        allocation = request.allocation
        if allocation is None:
            return None
        return (
            allocation.path[-1]
            if allocation.path
            else self._cache.tree.roots.get(allocation.chain.root)
        )

    def _current_counts(self) -> tuple[int, int]:
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def _pass_to(self, now: float) -> None:
        """Adds the time since the last call to the totals of running and waiting requests."""
        passed_s = now - self._noted_at if self._noted_at is not None else 0.0
        self._running_s += passed_s * self._counts[0]
        self._waiting_s += passed_s * self._counts[1]
        self._noted_at = now

    def _sample(self, now: float) -> Sample:
        steps, stats = self._scheduler.stats, self._cache.stats
        return Sample(
            at=now,
            queries=stats.queries,
            hits=stats.hits,
            computed=steps.prefill_tokens,
            decoded=steps.decode_tokens,
            running_s=round(self._running_s, 3),
            waiting_s=round(self._waiting_s, 3),
        )

    def _state(self, view: View, now: float) -> dict[str, Any]:
        cache = self._cache
        places = {node.digest: place for node, place in view.places.items()}
        samples = [sample for sample in self._samples if sample.at < now]
        seen = [(one, _ago(one.at, now), places.get(one.hit or b"")) for one in self._seen]
        return {
            "engine": self._facts,
            "page_size": cache.page_size,
            "grid": cache.grid,
            "pages": _pool(cache.pages),
            "slots": _pool(cache.slots),
            "pages_a_slot": cache.storage.pages_a_slot,
            "lost": {reason.value: num for reason, num in cache.stats.lost.items() if num},
            "evicted": cache.stats.checkpoints_evicted,
            "samples": [
                msgspec.structs.replace(sample, at=_ago(sample.at, now))
                for sample in [*samples, self._sample(now)]
            ],
            "prompts": [
                {**msgspec.structs.asdict(one), "at": ago, "hit": place} for one, ago, place in seen
            ],
            "num_running": len(self._scheduler.running),
            "num_waiting": len(self._scheduler.waiting),
            "running": [_running(request, view, node) for request, node in self._running],
            "tree": {"num_runs": view.num_runs, "runs": [_run(run) for run in view.runs]},
        }


def _ago(at: float, now: float) -> float:
    return round(now - at, 1)


def _pool(pool: Pool) -> dict[str, int]:
    return {
        "used": pool.num_used,
        "cached": pool.num_cached,
        "free": pool.num_free,
        "total": pool.total,
    }


def _running(request: Request, view: View, node: Node | None) -> Sequence[Any]:
    """Returns [id, run or None, tokens consumed, prompt tokens, tokens so far] of a request."""
    place = view.places.get(node) if node is not None else None
    prompt, tokens = request.num_prompt_tokens, request.num_tokens
    return [request.id, place, request.num_computed_tokens, prompt, tokens]


def _run(run: PageRun) -> Sequence[Any]:
    """Returns a run as [id, parent, first page, pages, strays, [[position, kind, uses], ...],
    checkpoints, [runs, pages, checkpoints] that are not listed below it, or None]."""
    others = (run.num_others, run.other_pages, run.other_checkpoints) if run.num_others else None
    checkpoints = [(one.position, one.kind, one.num_uses) for one in run.checkpoints]
    return [
        run.id,
        run.parent,
        run.first,
        run.num_pages,
        run.num_strays,
        checkpoints,
        run.num_checkpoints,
        others,
    ]
