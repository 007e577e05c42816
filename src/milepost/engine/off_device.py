"""The interfaces of memory outside the device: tiers, and the pools of other engines.

The step loop runs over a tuple of them and knows neither by name. Each reports to the scheduler by
itself what it has loaded. An annex provides the exchange with other engines, as a `PoolAccess`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from milepost.engine.metrics import Metric
from milepost.scheduler.plans import Load, StepPlan

if TYPE_CHECKING:
    from milepost.engine.loop import Completion, RequestGroup
    from milepost.runner.runner import Runner
    from milepost.scheduler.scheduler import Scheduler

Fence = Callable[[], Callable[[], bool]]
"""Returns a function that tells whether all work queued on the device by now is done."""


class OffDevice:
    """Memory outside the device. By default, a method does nothing."""

    waker: socket.socket | None = None
    """Readable once something has arrived."""

    @property
    def has_work(self) -> bool:
        """Whether it holds completions that are not queued yet."""
        return False

    @property
    def rest_s(self) -> float | None:
        """Seconds until `do_idle_work` is due again if nothing else happens; None for never."""
        return None

    def poll(self) -> None:
        """Handles what has arrived since the last call."""

    def hold(self, group: RequestGroup, completion: Completion) -> bool:  # noqa: ARG002
        """Whether it holds a completion back, to queue it later when more is known."""
        return False

    def note_queued(self, group: RequestGroup, completion: Completion) -> None:
        """Records that the scheduler has the request of a completion."""

    def drop(self, group: RequestGroup) -> list[Completion]:  # noqa: ARG002
        """Returns the completions of a group that it held back, and stops holding them."""
        return []

    def note_finished(self, group: RequestGroup) -> None:
        """Records that all completions of a group have ended."""

    def begin_loads(self, loads: tuple[Load, ...], fence: Fence) -> None:
        """Begins the loads of a plan that was launched."""

    def end_loads(self) -> None:
        """Ends every load. Called before the scheduler rolls back a step."""

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Records how long a step took."""

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        """Waits for a load, for `seconds` at most. Returns False at once if none is under way."""
        return False

    def do_idle_work(self) -> bool:
        """Does work that was left for an idle moment. Returns whether there will be more soon."""
        return False

    def flush(self) -> None:
        """Waits until all stores are done."""

    def reset(self, *, with_files: bool) -> None:
        """Drops what it has cached in memory, and with `with_files` also on disk."""

    def metrics(self) -> list[Metric]:
        """Returns its counters and gauges."""
        return []

    def close(self, *, is_whole: bool) -> None:
        """Ends it. `is_whole` says that no step has failed, so what is left may still be stored."""


AskRanks = Callable[[bytes], Future[bool]]
"""Sends an annex's command to all other ranks. The future tells whether all have carried it out."""


class RankWorker(Protocol):
    """Carries out an annex's commands on a rank other than the first."""

    def do(self, ticket: int, command: bytes) -> None:
        """Begins to carry out a command; it is answered with its ticket."""

    def close(self) -> None:
        """Ends the worker; no command follows."""


class PoolAccess(Protocol):
    """One rank's access to other engines' pools, and theirs to its own."""

    def off_device(
        self,
        scheduler: Scheduler,
        runner: Runner,
        enter: Callable[[RequestGroup, Completion], None],
        ask: AskRanks | None,
    ) -> OffDevice:
        """Returns what the first rank's step loop calls. `enter` queues a completion that was held,
        and `ask` has the other ranks do their part; None without others.
        """
        ...

    def worker(
        self,
        runner: Runner,
        answer: Callable[[int, bool], None],
        fail: Callable[[Exception], object],
    ) -> RankWorker:
        """Returns the part of another rank. It calls `answer` with a command's ticket and whether
        it succeeded, and `fail` with what ends the rank; both from any thread.
        """
        ...
