"""The protocols of what is kept outside the device: tiers, and what other engines have.

The step loop runs over a tuple of them and knows neither by name. Each tells the scheduler by
itself what has been loaded. An annex brings the exchange with other engines, as a `PoolAccess`.
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


class OffDevice(Protocol):
    """Memory outside the device. A method does nothing unless a part says otherwise."""

    has_work: bool = False
    """Whether it holds completions that are not queued yet."""
    rest_s: float | None = None
    """Seconds until `do_idle_work` is due again if nothing else happens; None for never."""
    waker: socket.socket | None = None
    """Readable once something has arrived."""

    def poll(self) -> None:
        """Takes in what has arrived."""

    def hold(self, group: RequestGroup, completion: Completion) -> bool:  # noqa: ARG002
        """Returns whether it keeps a completion for now, to queue it once more is known."""
        return False

    def note_queued(self, group: RequestGroup, completion: Completion) -> None:
        """Notes that the scheduler has the request of a completion."""

    def drop(self, group: RequestGroup) -> list[Completion]:  # noqa: ARG002
        """Returns the completions of a group that it held, and holds them no more."""
        return []

    def note_finished(self, group: RequestGroup) -> None:
        """Notes that all completions of a group have ended."""

    def begin_loads(self, loads: tuple[Load, ...], fence: Fence) -> None:
        """Begins the loads of a plan that was launched."""

    def end_loads(self) -> None:
        """Ends every load. Called before the scheduler rolls back a step."""

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took."""

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        """Waits this long for a load. Returns False at once if none is under way."""
        return False

    def do_idle_work(self) -> bool:
        """Does what is due while nothing runs. Returns whether there will be more soon."""
        return False

    def flush(self) -> None:
        """Waits until all stores are done."""

    def reset(self, *, with_files: bool) -> None:
        """Forgets what it has cached in memory, and `with_files` also on disk."""

    def metrics(self) -> list[Metric]:
        """Returns its counters and gauges."""
        return []

    def close(self, *, is_whole: bool) -> None:
        """Ends it; `is_whole` if no step has failed, so that what is left may still be stored."""


AskRanks = Callable[[bytes], Future[bool]]
"""Sends an annex's command to all other ranks. The future tells whether all have carried it out."""


class RankWorker(Protocol):
    """Carries out an annex's commands on a rank other than the first."""

    def do(self, ticket: int, order: bytes) -> None:
        """Begins to carry out a command; it is answered with its ticket."""

    def close(self) -> None:
        """Ends it."""


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
