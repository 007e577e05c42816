"""Copies between a rank's pools and its host memory, in parallel with the steps.

A stored item goes through a staging area on the device. The copy to the staging area is ordered
with the steps, so nothing launched later can overwrite the item first; the copy to the host runs on
a stream of its own. The staging place is reused once that copy's event has passed. A load waits for
everything launched before the plan that names it. On a CPU, copies are made at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from milepost.cache.plans import What
from milepost.scheduler.plans import Store
from milepost.tiers.arena import Arena, allocate_staging
from milepost.tiers.commands import ItemRun


class DeviceEvent(Protocol):
    """An event that passes once everything launched before it is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def seconds(self) -> float | None:
        """Returns the duration of the copies before the event, if it is known. The event must have
        passed.
        """
        ...


CopyList = Sequence[tuple[Arena, Arena, ItemRun]]
"""Copies to make, each as: target, source, and what."""


class Passed:
    """An event that has passed, after copies lasting `seconds`."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds(self) -> float | None:
        return self._seconds


class DirectLink:
    """A link between memories that one processor copies, at once."""

    needs_staging = False

    def now(self) -> DeviceEvent:
        """Returns an event that passes once all launched steps are done."""
        return Passed()

    def order(self, event: DeviceEvent) -> None:
        """Makes steps that are launched from now on wait for an event."""
        event.synchronize()

    def copy(self, copies: CopyList) -> None:
        """Copies now, ordered with the steps."""
        for target, source, run in copies:
            target.copy(source, run)

    def copy_behind(self, event: DeviceEvent, copies: CopyList, *, up: bool) -> DeviceEvent:  # noqa: ARG002
        """Copies in parallel with the steps, once an event has passed."""
        event.synchronize()
        begun_s = time.perf_counter()
        self.copy(copies)
        return Passed(time.perf_counter() - begun_s)


class CudaEvent:
    """A point on a stream. Knows the duration of the copies before it if `begin` was called."""

    def __init__(self) -> None:
        self._begin: torch.cuda.Event | None = None
        self.end = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def query(self) -> bool:
        return bool(self.end.query())

    def synchronize(self) -> None:
        self.end.synchronize()

    def seconds(self) -> float | None:
        return None if self._begin is None else self._begin.elapsed_time(self.end) / 1e3


class CudaLink(DirectLink):
    """A link with one stream for each direction, besides the steps' stream."""

    needs_staging = True

    def __init__(self, device: torch.device) -> None:
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def now(self) -> DeviceEvent:
        event = CudaEvent()
        event.end.record()
        return event

    def order(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream().wait_event(event.end)

    def copy_behind(self, event: DeviceEvent, copies: CopyList, *, up: bool) -> DeviceEvent:
        stream = self._up if up else self._down
        assert isinstance(event, CudaEvent)
        done = CudaEvent()
        with torch.cuda.stream(stream):
            stream.wait_event(event.end)
            done.begin()
            self.copy(copies)
            done.end.record()
        return done


class DeviceHostCopies:
    """Makes one rank's copies. If the link needs staging, at most `num_staged` pages and states may
    be leaving the device at a time.
    """

    def __init__(
        self, device: Arena, host: Arena, link: DirectLink, num_staged: tuple[int, int]
    ) -> None:
        self.host, self._device, self._link = host, device, link
        self.staging: Arena | None = None
        num_pages, num_states = num_staged
        if link.needs_staging:
            self.staging = allocate_staging(device, num_pages, num_states)
        self._free = {False: list(range(num_pages)), True: list(range(num_states))}
        self._leaving: deque[tuple[list[tuple[What, int]], DeviceEvent]] = deque()

    def store(self, stores: Sequence[Store]) -> DeviceEvent:
        """Copies out what the pools hold now. The event passes once it is in host memory."""
        if self.staging is None:
            runs = [(s.what, s.place, s.id, 1, s.windows) for s in stores]
            self._link.copy([(self.host, self._device, run) for run in runs])
            return Passed()
        self._reuse()
        staged = [(s.what, self._free[s.what == "state"].pop()) for s in stores]
        pairs = list(zip(stores, staged, strict=True))
        runs = [(s.what, at, s.id, 1, s.windows) for s, (_, at) in pairs]
        self._link.copy([(self.staging, self._device, run) for run in runs])
        moved: list[ItemRun] = [(s.what, s.place, at, 1, ()) for s, (_, at) in pairs]
        copies = [(self.host, self.staging, run) for run in moved]
        done = self._link.copy_behind(self._link.now(), copies, up=False)
        self._leaving.append((staged, done))
        return done

    def now(self) -> DeviceEvent:
        """Returns an event that passes once all launched steps are done."""
        return self._link.now()

    def order(self, event: DeviceEvent) -> None:
        """Makes steps that are launched from now on wait for an event."""
        self._link.order(event)

    def bring(self, after: DeviceEvent, runs: Sequence[ItemRun]) -> DeviceEvent:
        """Copies to the device, once `after` has passed."""
        copies = [(self._device, self.host, run) for run in runs]
        return self._link.copy_behind(after, copies, up=True)

    def _reuse(self) -> None:
        """Frees the staging places that have been read."""
        while self._leaving and self._leaving[0][1].query():
            for what, place in self._leaving.popleft()[0]:
                self._free[what == "state"].append(place)
