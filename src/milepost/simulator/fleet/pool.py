"""Engines among which one routing chooses."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.simulator.fleet.engine import FleetEngine
from milepost.simulator.fleet.routing import ROUTINGS, Pages, Routing, Traffic
from milepost.simulator.trace import TraceRequest


class EnginePool:
    """Some engines of a fleet, with their traffic."""

    def __init__(self, engines: Sequence[FleetEngine], routing: str) -> None:
        self.engines = engines
        self.traffic, pages = Traffic(len(engines)), Pages(len(engines))
        if routing in ("events", "prefix"):
            for number, engine in enumerate(engines):
                engine.scheduler.outside.add_listener(pages.listener(number))
        self._pages = pages
        self._routing: Routing = ROUTINGS[routing](self.traffic, pages)

    def send(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> tuple[int, int]:
        """Chooses an engine for a request; returns it, and the tokens that it should compute."""
        at, traffic = self._routing.choose(asked, keys, page_size), self.traffic
        hit = self._pages.depths(keys).get(at, 0) * page_size
        expected = max(asked.input_length - hit, 1)
        traffic.num_requests[at] += 1
        traffic.num_sent[at] += 1
        traffic.num_prefilling[at] += expected
        return at, expected
