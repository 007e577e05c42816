"""When functions of an engine ran, on the clock that all processes of a machine share.

`watch()` in each process before its engine is built; `take()` returns what has run since, and
`show` prints what several processes have, side by side. What takes less than `LEAST_S` is left
out. A span holds those that it called.
"""

from __future__ import annotations

import functools
import gc
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

LEAST_S = 50e-6
WATCHED = {
    "milepost.engine.loop.core:Engine": "queue step poll _publish",
    "milepost.engine.loop.pipeline:StepPipeline": "_start collect _start_ahead settle",
    "milepost.engine.loop.completions:RunningCompletions": "take",
    "milepost.disaggregation.exchange:Exchange": "note_finished begin_loads",
    "milepost.scheduler.scheduler:Scheduler": "schedule follow update arrived",
    "milepost.runner.runner:Runner": "launch sample collect copy",
    "milepost.disaggregation.connector:Connector": "_pull _pulled _grant",
    "milepost.disaggregation.lender:Lender": "answer _claim _greeted _release reply",
    "milepost.disaggregation.pulls:Pulls": "begin _claimed _read _confirm _end",
    "milepost.disaggregation.nixl:Nixl": "add_peer begin is_done go_on",
    "milepost.disaggregation.peers:Peer": "ask _welcomed",
}
ALWAYS = ("begin", "_claimed", "_read", "_confirm", "_end", "_claim", "_release", "reply", "queue")
"""Shown however short they were."""


class Span(NamedTuple):
    began_s: float
    seconds: float
    thread: str
    what: str


_spans: list[Span] = []


def watch() -> None:
    for place, names in WATCHED.items():
        module, _, class_name = place.partition(":")
        owner = getattr(importlib.import_module(module), class_name)
        for name in names.split():
            setattr(owner, name, _timed(getattr(owner, name), f"{class_name}.{name}", name))
    gc.callbacks.append(_note_collection)


def take() -> list[Span]:
    found = _spans.copy()
    _spans.clear()
    return found


def show(start_s: float, by_process: dict[str, Sequence[Span]]) -> None:
    """In milliseconds from `start_s` on: when, for how long, in which process and thread, what."""
    rows = [(span, who) for who, spans in by_process.items() for span in spans]
    for span, who in sorted(rows):
        at, took = 1e3 * (span.began_s - start_s), 1e3 * span.seconds
        print(f"{at:10.2f} {took:8.2f}  {who:8} {span.thread[:10]:10} {span.what}", flush=True)


def _timed(function: Callable[..., Any], label: str, name: str) -> Callable[..., Any]:
    is_shown = name in ALWAYS

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - began_s
            if is_shown or seconds > LEAST_S:
                _spans.append(Span(began_s, seconds, threading.current_thread().name, label))

    return timed


def _note_collection(phase: str, info: dict[str, int]) -> None:
    """Python's collector is at work: everything of this process waits."""
    now = time.perf_counter()
    if phase == "start":
        _note_collection.began_s = now  # type: ignore[attr-defined]
        return
    seconds = now - _note_collection.began_s  # type: ignore[attr-defined]
    if seconds > LEAST_S:
        what = f"collector, generation {info['generation']}"
        _spans.append(Span(now - seconds, seconds, threading.current_thread().name, what))
