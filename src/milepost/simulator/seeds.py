"""The same requests at other times, so that a comparison does not depend on one order of events."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from milepost.simulator.trace import Trace, TraceRequest


def reseeded(trace: Trace, seed: int) -> Trace:
    """As recorded for seed 0. Else sessions exchange their starts; without sessions, whose order is
    not known to be free, the gaps between arrivals are shuffled and the requests keep their order.
    """
    if not seed:
        return trace
    order = random.Random(seed)
    if any(request.session is not None for request in trace.requests):
        requests = _exchange_starts(trace.requests, order)
    else:
        requests = _shuffle_gaps(trace.requests, order)
    return replace(trace, requests=requests)


def _exchange_starts(requests: list[TraceRequest], order: random.Random) -> list[TraceRequest]:
    starts: dict[str | None, float] = {}
    for request in requests:
        starts.setdefault(request.session, request.arrival_s)
    moved = list(starts.values())
    order.shuffle(moved)
    shifts = {name: to - starts[name] for name, to in zip(starts, moved, strict=True)}
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
