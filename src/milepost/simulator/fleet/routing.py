"""Chooses the engine that a request is sent to. A routing knows what a real router knows: the
requests that it sent to each engine and that are unfinished, and the pages that each announces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from milepost.cache.events import Cleared, Event, PagesReachable, PagesUnreachable
from milepost.scheduler import routing
from milepost.simulator.fleet.engine import FleetEngine
from milepost.simulator.trace import TraceRequest


class Traffic:
    """Requests under way at each engine."""

    def __init__(self, num_engines: int) -> None:
        self.num_requests = [0] * num_engines
        self.num_prefilling = [0] * num_engines
        """Tokens of prompts that have no first token yet, without those expected to hit."""
        self.num_sent = [0] * num_engines
        """Number of requests, over or not."""

    def least_busy(self) -> int:
        """Returns the engine with the fewest requests, or the one that was sent least of those."""
        sent = self.num_sent
        return min(range(len(sent)), key=lambda at: (self.num_requests[at], sent[at]))


class Pages:
    """The pages that engines announce as usable."""

    def __init__(self, num_engines: int) -> None:
        self._holders: dict[bytes, int] = {}
        """The engines that have a page, as a bit each."""
        self._own: list[dict[bytes, int]] = [{} for _ in range(num_engines)]
        """Number of an engine's memories in which each page is usable."""

    def listener(self, engine: int) -> Callable[[tuple[Event, ...]], None]:
        """Returns a function that takes an engine's events."""
        holders, held, bit = self._holders, self._own[engine], 1 << engine

        def drop(key: bytes) -> None:
            left = holders[key] & ~bit
            if left:
                holders[key] = left
            else:
                del holders[key]

        def take(events: tuple[Event, ...]) -> None:
            for event in events:
                match event:
                    case PagesReachable():
                        for key in event.keys:
                            held[key] = held.get(key, 0) + 1
                            holders[key] = holders.get(key, 0) | bit
                    case PagesUnreachable():
                        for key in event.keys:
                            held[key] -= 1
                            if not held[key]:
                                del held[key]
                                drop(key)
                    case Cleared():
                        for key in held:
                            drop(key)
                        held.clear()

        return take

    def depths(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Returns the number of a prompt's first pages at each engine that has any."""
        depths: dict[int, int] = {}
        known = self._holders.get(keys[0], 0) if keys else 0
        for depth, key in enumerate(keys):
            holders = known & self._holders.get(key, 0)
            _note(depths, known & ~holders, depth)
            known = holders
            if not known:
                return depths
        _note(depths, known, len(keys))
        return depths


def _note(found: dict[int, int], engines: int, depth: int) -> None:
    while engines:
        lowest = engines & -engines
        found[lowest.bit_length() - 1] = depth
        engines ^= lowest


class Routing(Protocol):
    """Chooses an engine for each request."""

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:
        """Returns the number of an engine; `keys` are those of the prompt's full pages."""
        ...


class RoundRobin:
    """Chooses one engine after the other."""

    def __init__(self, traffic: Traffic, pages: Pages) -> None:  # noqa: ARG002
        self._num_engines = len(traffic.num_sent)
        self._next = 0

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % self._num_engines


class BySession:
    """Keeps a conversation at its first engine, the least busy one then. In a trace without
    sessions, prompts with the same first page are one conversation."""

    def __init__(self, traffic: Traffic, pages: Pages) -> None:  # noqa: ARG002
        self._traffic = traffic
        self._engines: dict[object, int] = {}

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:  # noqa: ARG002
        who = asked.session if asked.session is not None else (keys[0] if keys else None)
        known = self._engines.get(who) if who is not None else None
        if known is None:
            known = self._engines[who] = self._traffic.least_busy()
        return known


class ByPrefix:
    """Chooses like `milepost.ray`: the engine where a request costs least. Among equals, the least
    busy engine, then the one that was sent least."""

    def __init__(self, traffic: Traffic, pages: Pages) -> None:
        self._traffic, self._pages = traffic, pages

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:
        traffic, depths = self._traffic, self._pages.depths(keys)
        length = asked.input_length

        def rank(at: int) -> tuple[int, ...]:
            lacking = length - min(depths.get(at, 0) * page_size, length - 1)
            num_requests = traffic.num_requests[at]
            cost = self._cost(lacking, traffic.num_prefilling[at], num_requests)
            return cost, num_requests, traffic.num_sent[at]

        return min(range(len(traffic.num_sent)), key=rank)

    def _cost(self, num_lacking: int, num_waiting: int, num_requests: int) -> int:  # noqa: ARG002
        return routing.cost(num_lacking, num_waiting)


class ByEvents(ByPrefix):
    """Chooses like vllm-router's `kv_aware` policy: the fewest tokens that an engine lacks or has
    under way, times its requests including this one."""

    def _cost(self, num_lacking: int, num_waiting: int, num_requests: int) -> int:
        return (num_lacking + num_waiting) * (num_requests + 1)


ROUTINGS: dict[str, Callable[[Traffic, Pages], Routing]] = {
    "round-robin": RoundRobin,
    "session": BySession,
    "events": ByEvents,
    "prefix": ByPrefix,
}
"""Routings by name."""


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
