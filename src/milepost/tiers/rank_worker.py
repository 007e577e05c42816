"""Tiers of a rank other than the first: its own copies and files.

The first rank decides for all. Items that a plan stores are copied out when the plan is launched;
everything else arrives as commands, each answered once it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from milepost.runner.runner import Runner
from milepost.scheduler.plans import Load, Store
from milepost.tiers.commands import Bring, OnDisk, Stored, TierCommand
from milepost.tiers.device_copies import DeviceEvent, DeviceHostCopies
from milepost.tiers.disk import NUM_READERS
from milepost.tiers.files import Files
from milepost.tiers.threads import Threads


class RankTierWorker:
    """A `PoolTransfers` of `runner`. It calls `answer`, from any thread, with a command's ticket
    and whether it succeeded. Each thread calls `begin_thread` first."""

    def __init__(
        self,
        runner: Runner,
        copies: DeviceHostCopies,
        files: Files | None,
        answer: Callable[[int, bool], None],
        begin_thread: Callable[[], object],
    ) -> None:
        self._runner, self._copies, self._files, self._answer = runner, copies, files, answer
        self._stores: deque[DeviceEvent] = deque()
        self._loads: dict[int, tuple[Load, DeviceEvent]] = {}
        self._down, self._up, self._writer, self._readers = (
            Threads(num, "tiers", begin_thread) for num in (1, 1, 1, NUM_READERS)
        )

    def store(self, stores: Sequence[Store]) -> None:
        self._stores.append(self._copies.store(stores))

    def load(self, load: Load) -> None:
        self._loads[load.number] = load, self._copies.now()

    def do(self, ticket: int, command: TierCommand) -> None:
        """Begins to carry out a command of the first rank."""
        match command:
            case Stored():
                self._await(self._down, ticket, self._stores.popleft())
            case Bring():
                load, after = self._loads.pop(command.number)
                if command.runs:
                    for arrival in load.arrivals:
                        if arrival.what == "state":
                            self._runner.filled(arrival.id, load.position)
                self._await(self._up, ticket, self._copies.bring(after, command.runs))
            case OnDisk():
                pool = self._readers if command.do == "read" else self._writer
                pool.submit(self._run, ticket, lambda: self._on_disk(command))

    def _await(self, pool: Threads, ticket: int, event: DeviceEvent) -> None:
        def wait() -> bool:
            event.synchronize()
            return True

        pool.submit(self._run, ticket, wait)

    def _on_disk(self, command: OnDisk) -> bool:
        assert self._files is not None, "what is on disk has files"
        contents = self._copies.host.of(command.name.what).buffers(command.place)
        if command.do == "read":
            return self._files.read(command.name, contents)
        if command.do == "write":
            return self._files.write(command.name, command.tokens, contents)
        self._files.remove(command.name)
        return True

    def _run(self, ticket: int, work: Callable[[], bool]) -> None:
        is_well = False
        try:
            is_well = work()
        finally:
            self._answer(ticket, is_well)
