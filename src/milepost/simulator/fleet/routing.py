"""Chooses the engine that a request is sent to. A routing knows what a real router knows: the
requests that it sent to each engine and that are unfinished, and the pages that each announces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from milepost.cache.events import Cleared, Event, PagesReachable, PagesUnreachable
from milepost.scheduler import routing
from milepost.simulator.trace import TraceRequest

LOOK_AHEAD = 256
"""Requests to an engine within which a conversation there is likely to go on, as in the cache."""


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
        self._most = [0] * num_engines
        self._has_dropped = [False] * num_engines

    def capacity(self, engine: int) -> int | None:
        """Returns the pages that fit an engine: the most that it had, once it has dropped some."""
        return self._most[engine] if self._has_dropped[engine] else None

    def listener(self, engine: int) -> Callable[[tuple[Event, ...]], None]:
        """Returns a function that takes an engine's events."""
        holders, own, bit = self._holders, self._own[engine], 1 << engine

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
                            own[key] = own.get(key, 0) + 1
                            holders[key] = holders.get(key, 0) | bit
                        self._most[engine] = max(self._most[engine], len(own))
                    case PagesUnreachable():
                        self._has_dropped[engine] = True
                        for key in event.keys:
                            own[key] -= 1
                            if not own[key]:
                                del own[key]
                                drop(key)
                    case Cleared():
                        for key in own:
                            drop(key)
                        own.clear()

        return take

    def depths(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Returns the number of a prompt's first pages at each engine that has any."""
        found: dict[int, int] = {}
        known = self._holders.get(keys[0], 0) if keys else 0
        for depth, key in enumerate(keys):
            holders = known & self._holders.get(key, 0)
            _note(found, known & ~holders, depth)
            known = holders
            if not known:
                return found
        _note(found, known, len(keys))
        return found


def _note(found: dict[int, int], engines: int, depth: int) -> None:
    while engines:
        lowest = engines & -engines
        found[lowest.bit_length() - 1] = depth
        engines ^= lowest


class LivePaths:
    """Pages at each engine that are likely to be asked for again: those of the prompts among the
    last `LOOK_AHEAD` requests sent there, without those that a later prompt continues.
    """

    def __init__(self, num_engines: int) -> None:
        self.num_pages = [0] * num_engines
        self._paths: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(num_engines)]
        """Length of each path by the key of its last page, the oldest first."""

    def sent(self, engine: int, keys: Sequence[bytes]) -> None:
        """Notes the pages of a prompt that is sent to an engine."""
        if not keys:
            return
        paths = self._paths[engine]
        before = next((key for key in reversed(keys) if key in paths), None)
        self.num_pages[engine] += len(keys) - (0 if before is None else paths.pop(before))
        paths[keys[-1]] = len(keys)
        if len(paths) > LOOK_AHEAD:
            _, num_pages = paths.popitem(last=False)
            self.num_pages[engine] -= num_pages


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


class ByEvents:
    """Chooses like vllm-router's `kv_aware` policy: the fewest tokens that an engine lacks or has
    under way, times its requests including this one. Among equals, the engine that was sent least.
    """

    def __init__(self, traffic: Traffic, pages: Pages) -> None:
        self._traffic, self._pages = traffic, pages

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:
        traffic, depths = self._traffic, self._pages.depths(keys)
        length = asked.input_length

        def cost(at: int) -> tuple[int, int]:
            hit = min(depths.get(at, 0) * page_size, length - 1)
            tokens = length - hit + traffic.num_prefilling[at]
            return tokens * (traffic.num_requests[at] + 1), traffic.num_sent[at]

        return min(range(len(traffic.num_sent)), key=cost)


class ByPrefix:
    """Chooses like `milepost.ray`: the least cost of the tokens that an engine lacks, of those that
    wait there, and of what it would evict that others are likely to ask for. Among equals, the
    least busy engine, then the one that was sent least."""

    def __init__(self, traffic: Traffic, pages: Pages) -> None:
        self._traffic, self._pages = traffic, pages
        self._live = LivePaths(len(traffic.num_sent))

    def choose(self, asked: TraceRequest, keys: Sequence[bytes], page_size: int) -> int:
        traffic, depths = self._traffic, self._pages.depths(keys)
        length = asked.input_length

        def rank(at: int) -> tuple[int, int, int]:
            lacking = length - min(depths.get(at, 0) * page_size, length - 1)
            displaced = self._displaced(at, lacking, page_size)
            cost = routing.cost(lacking, traffic.num_prefilling[at], displaced)
            return cost, traffic.num_requests[at], traffic.num_sent[at]

        chosen = min(range(len(traffic.num_sent)), key=rank)
        self._live.sent(chosen, keys)
        return chosen

    def _displaced(self, at: int, lacking: int, page_size: int) -> int:
        """Returns the tokens likely to be asked for again that would go for those lacking."""
        capacity = self._pages.capacity(at)
        if capacity is None:
            return 0
        live = self._live.num_pages[at]
        return min(max((live - capacity) * page_size + lacking, 0), lacking)


ROUTINGS: dict[str, Callable[[Traffic, Pages], Routing]] = {
    "round-robin": RoundRobin,
    "session": BySession,
    "events": ByEvents,
    "prefix": ByPrefix,
}
"""Routings by name."""
