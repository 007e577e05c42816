"""Traffic of the benchmarks in virtual time: recorded traces, and made-up kinds unlike them.

A made-up kind is drawn anew for each seed; a recorded trace has its sessions exchange their starts,
or its gaps shuffled.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from milepost.simulator.made import AGENT, CHAT, PAGE_SIZE, Habit, make_sessions
from milepost.simulator.seeds import faster, reseeded
from milepost.simulator.trace import Trace, TraceRequest, read_trace

RECORDED = ("agent-dev", "mooncake-conversation", "mooncake-synthetic")

LONG_CHAT = replace(CHAT, name="chat", first_length=4000, num_turns=8.0)
ONE_OFF = replace(CHAT, name="one-off", system_length=0, first_length=8000, num_turns=0.01)
UNDER_SYSTEM = replace(ONE_OFF, num_systems=12, system_length=4096, first_length=1200)
"""A prompt that never returns, under one of twelve system prompts."""
SCAN_S = 200.0, 400.0
"""When the one-off prompts of a scan arrive."""
NUM_TURNS = 20
"""Of each session of a cycle."""


def _sessions(*habits: Habit, num_sessions: int, load: float, seed: int) -> Trace:
    return faster(make_sessions(habits, num_sessions, seed=seed), load)


def _scan(seed: int) -> Trace:
    """Chats, and in the middle of them as many tokens in prompts that never return."""
    trace, draw = make_sessions((LONG_CHAT, ONE_OFF, ONE_OFF), 120, seed=seed), random.Random(seed)
    moved = [_moved(request, draw) for request in trace.requests]
    return replace(trace, requests=sorted(moved, key=lambda request: request.arrival_s))


def _moved(request: TraceRequest, draw: random.Random) -> TraceRequest:
    if not str(request.session).startswith(ONE_OFF.name):
        return request
    return replace(request, arrival_s=draw.uniform(*SCAN_S))


def _cycle(seed: int) -> Trace:
    """Thirty sessions that take turns, each a second after its answer."""
    draw, requests, num_ids = random.Random(seed), list[TraceRequest](), 0
    for number in range(30):
        num_pages = draw.randint(90, 110)
        pages = array("I", range(num_ids, num_ids + num_pages + 2 * NUM_TURNS))
        num_ids += len(pages)
        requests += [
            TraceRequest(
                arrival_s=float(turn),
                input_length=PAGE_SIZE * (num_pages + 2 * turn) + 1,
                output_length=60,
                page_ids=pages[: num_pages + 2 * turn],
                session=f"{number}",
                think_s=1.0,
            )
            for turn in range(NUM_TURNS)
        ]
    for request in requests:
        request.own_id, num_ids = num_ids, num_ids + 2
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name="cycle", page_size=PAGE_SIZE, requests=requests, num_page_ids=num_ids)


MADE_UP: dict[str, Callable[..., Trace]] = {
    "made-agents": partial(_sessions, AGENT, num_sessions=32, load=2),
    "mix": partial(_sessions, LONG_CHAT, ONE_OFF, ONE_OFF, num_sessions=120, load=2),
    "scan": _scan,
    "cycle": _cycle,
    "systems": partial(_sessions, UNDER_SYSTEM, num_sessions=400, load=4),
}
"""`made-agents` are those of `milepost simulate agents --sessions 32 --load 2`; `mix` has chats and
two one-off prompts for each; in `scan` those come all within three minutes; `cycle` is thirty
sessions in turn, more than fit; `systems` is prompts that never return under twelve system prompts.
"""
SIZES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(RECORDED, (48, 64, 96, 128)),
    "made-agents": (8,),
    "mix": (3,),
    "scan": (3,),
    "cycle": (8,),
    "systems": (2,),
}
"""GiB for KV and states at which each is replayed."""


def read(name: str, folder: Path, *, limit: int, seed: int) -> Trace:
    """Returns the first `limit` requests of a recorded trace, or all of a made-up kind's."""
    if name in MADE_UP:
        trace = MADE_UP[name](seed=seed)
    else:
        trace = reseeded(read_trace(folder / f"{name}.jsonl.gz", limit=limit), seed)
    trace.link_answers()
    return trace
