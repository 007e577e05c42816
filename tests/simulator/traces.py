"""Made-up traces, and where the recorded ones are."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from milepost.scheduler.memory import PrefixMemory
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet import EngineLimits, Fleet, Shape
from milepost.simulator.trace import Trace, TraceRequest

DATA = Path(__file__).parent.parent / "data"
TRACES = os.environ.get("MILEPOST_TRACES")
"""Folder with the whole recorded traces; the tests that need it are skipped without."""

needs_traces = pytest.mark.skipif(TRACES is None, reason="MILEPOST_TRACES names no folder")


def one_engine(
    trace: Trace,
    cache: PrefixMemory,
    cost: CostModel,
    *,
    limits: EngineLimits | None = None,
    **options: Any,
) -> Fleet:
    """A fleet of one."""
    return Fleet(trace, lambda: cache, cost, Shape(limits=limits or EngineLimits()), **options)


class Maker:
    """Builds a trace prompt by prompt; pages of 64 tokens."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        self.num_ids = 0

    def pages(self, num: int) -> list[int]:
        """New page ids."""
        self.num_ids += num
        return list(range(self.num_ids - num, self.num_ids))

    def ask(self, pages: list[int], **options) -> None:
        fields = {"arrival_s": float(len(self.requests)), "output_length": 1} | options
        prompt = {"input_length": 64 * len(pages) + 1, "page_ids": array("I", pages)}
        self.requests.append(TraceRequest(**(fields | prompt)))

    def trace(self) -> Trace:
        for request in self.requests:
            request.own_id = self.num_ids
            self.num_ids += 2 + request.output_length // 64
        return Trace(name="made", page_size=64, requests=self.requests, num_page_ids=self.num_ids)


def round_robin(num_sessions: int, num_rounds: int) -> Trace:
    """Sessions that take turns: 30 pages each, 2 more each turn."""
    maker = Maker()
    sessions = [maker.pages(30) for _ in range(num_sessions)]
    for _ in range(num_rounds):
        for session in sessions:
            maker.ask(session)
            session += maker.pages(2)
    return maker.trace()
