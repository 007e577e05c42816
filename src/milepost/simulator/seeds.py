"""Moves a trace's requests to other times: for more load, or because a comparison should not depend
on one order of events.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from milepost.simulator.trace import Trace, TraceRequest


def reseeded(trace: Trace, seed: int) -> Trace:
    """Returns the trace as recorded for seed 0, and otherwise one whose sessions exchange their
    starts. Without sessions the gaps between arrivals are shuffled and the requests keep their
    order, which may not be free.
    """
    if not seed:
        return trace
    order = random.Random(seed)
    if any(request.session is not None for request in trace.requests):
        requests = _exchange_starts(trace.requests, order)
    else:
        requests = _shuffle_gaps(trace.requests, order)
    return replace(trace, requests=requests)


def faster(trace: Trace, load: float) -> Trace:
    """Returns a trace whose sessions start `load` times as fast, with the pauses between their
    requests as they were; without sessions all requests arrive faster.
    """
    if load == 1:
        return trace
    if any(request.session is not None for request in trace.requests):
        starts = _starts(trace.requests)
        requests = _moved(trace.requests, starts, [start / load for start in starts.values()])
    else:
        requests = [replace(r, arrival_s=r.arrival_s / load) for r in trace.requests]
    return replace(trace, requests=requests)


def _exchange_starts(requests: list[TraceRequest], order: random.Random) -> list[TraceRequest]:
    starts = _starts(requests)
    exchanged = list(starts.values())
    order.shuffle(exchanged)
    return _moved(requests, starts, exchanged)


def _starts(requests: list[TraceRequest]) -> dict[str | None, float]:
    starts: dict[str | None, float] = {}
    for request in requests:
        starts.setdefault(request.session, request.arrival_s)
    return starts


def _moved(
    requests: list[TraceRequest], starts: dict[str | None, float], to: list[float]
) -> list[TraceRequest]:
    """Returns the requests with their sessions moved to other starts, in order of arrival."""
    shifts = {name: new - starts[name] for name, new in zip(starts, to, strict=True)}
    shifted = [replace(r, arrival_s=r.arrival_s + shifts[r.session]) for r in requests]
    return sorted(shifted, key=lambda request: request.arrival_s)


def _shuffle_gaps(requests: list[TraceRequest], order: random.Random) -> list[TraceRequest]:
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(requests)]
    order.shuffle(gaps)
    now_s = requests[0].arrival_s
    moved = [replace(requests[0])]
    for request, gap_s in zip(requests[1:], gaps, strict=True):
        now_s += gap_s
        moved.append(replace(request, arrival_s=now_s))
    return moved
