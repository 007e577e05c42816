"""A directory whose every operation may fail, threads that run when they are told to, and engines
without a model that keep what leaves them there: with the real transfers, disk and files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from milepost.scheduler.plans import StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers import disk as disk_module
from milepost.tiers import files as files_module
from milepost.tiers import finding
from milepost.tiers.arena import Arena, ItemTensors
from milepost.tiers.device_copies import CopyList, DeviceEvent, DeviceHostCopies, Passed
from milepost.tiers.disk import Disk
from milepost.tiers.file_format import ALIGNMENT
from milepost.tiers.files import Files
from milepost.tiers.policy import Tiers
from milepost.tiers.transfers import TierTransfers
from tests.fakes import EMPTY, FakeRunner

IDENTITY = b"i" * 16
PAGE_BYTES, STATE_BYTES = 512, 64
ERRORS = (
    errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EDQUOT,
    errno.ENOENT, errno.ETIMEDOUT,
)  # fmt: skip


class Killed(BaseException):
    """The process is gone."""


class Faults:
    """What the system may refuse, below one directory: one operation in `every`, if any; and one in
    `kills` ends the process.
    """

    def __init__(self, folder: pathlib.Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.every = 0
        self.kills = 0
        self._are_about = False
        self.refused: dict[str, int] = {}
        """How often what was refused."""

    @contextlib.contextmanager
    def about(self) -> Iterator[None]:
        """Only what is done meanwhile may fail."""
        self._are_about = True
        try:
            yield
        finally:
            self._are_about = False

    def may_fail(self, name: str) -> None:
        is_look = name == "Path.stat"  # of which there are more than of all else
        if not self._are_about or (is_look and self.rng.randrange(20)):
            return
        if self.kills and not self.rng.randrange(self.kills):
            raise Killed
        if self.every and not self.rng.randrange(self.every):
            self.refused[name] = self.refused.get(name, 0) + 1
            number = self.rng.choice(ERRORS)
            kind = FileNotFoundError if number == errno.ENOENT else OSError
            raise kind(number, os.strerror(number))

    def patch(self, monkeypatch: Any) -> None:
        for name in ("open", "write", "replace", "scandir", "unlink", "fstat"):
            monkeypatch.setattr(files_module.os, name, self._wrapped(name, getattr(os, name)))
        for name in ("exists", "mkdir", "stat", "unlink"):
            original = getattr(pathlib.Path, name)
            monkeypatch.setattr(pathlib.Path, name, self._wrapped_method(name, original))
        monkeypatch.setattr(pathlib.Path, "open", self._opened(pathlib.Path.open))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._are_about and self._is_ours(args[0]):
                if name == "write" and len(args[1]) > 1:  # part of it, and no more perhaps
                    args = (args[0], args[1][: self.rng.randint(1, len(args[1]))])
                self.may_fail(name)
            return call(*args, **options)

        return wrapped

    def _wrapped_method(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: pathlib.Path, *args: Any, **options: Any) -> Any:
            if self._are_about and self._is_ours(path):
                self.may_fail(f"Path.{name}")
            return call(path, *args, **options)

        return wrapped

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: pathlib.Path, *args: Any, **options: Any) -> Any:
            if not (self._are_about and self._is_ours(path)):
                return call(path, *args, **options)
            self.may_fail("Path.open")
            return Opened(call(path, *args, **options), self)

        return opened

    def _is_ours(self, what: Any) -> bool:
        if isinstance(what, int):
            return os.readlink(f"/proc/self/fd/{what}").startswith(str(self.folder))
        return str(getattr(what, "path", what)).startswith(str(self.folder))


class Opened:
    """A file that is being read."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        if name != "fileno":
            self._faults.may_fail(f"file.{name}")
        return getattr(self._file, name)

    def readinto(self, piece: memoryview) -> int:
        self._faults.may_fail("file.readinto")
        if self._faults.every and not self._faults.rng.randrange(5 * self._faults.every):
            raise MemoryError
        num = self._file.readinto(piece[: self._faults.rng.randint(1, len(piece))])
        assert isinstance(num, int)
        return num


class Threads:
    """In place of an executor: jobs wait until `run`, those of several threads in any order."""

    def __init__(self, num_threads: int, *_: object) -> None:
        self._num_threads = num_threads
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: call(*args)))
        return future

    def run(self, rng: random.Random) -> None:
        self.jobs.rotate(-rng.randrange(min(self._num_threads, len(self.jobs))))
        future, job = self.jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except MemoryError as error:
                future.set_exception(error)

    def close(self) -> None:
        self.jobs.clear()


class LateEvent(Passed):
    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class Link:
    """Copies between a fake runner's memory and the host's, those up when they are told to."""

    needs_staging = False

    def __init__(self, runner: FakeRunner, host: Arena) -> None:
        self._runner, self._host = runner, host
        self.pending: list[tuple[LateEvent, CopyList]] = []

    def now(self) -> DeviceEvent:
        return Passed()

    def order(self, event: DeviceEvent) -> None:  # noqa: ARG002
        raise AssertionError("nobody waits on the device")

    def copy(self, copies: CopyList) -> None:
        for target, _, (what, first, other, num, _) in copies:
            for index in range(num):
                if target is self._host:
                    self._put_down(what, first + index, other + index)
                else:
                    self._put_up(what, first + index, other + index)

    def copy_behind(self, event: DeviceEvent, copies: CopyList, *, up: bool) -> DeviceEvent:  # noqa: ARG002
        done = LateEvent()
        self.pending.append((done, copies))
        return done

    def go_on(self, index: int) -> None:
        event, copies = self.pending.pop(index)
        self.copy(copies)
        event.is_over = True

    def _put_down(self, what: str, place: int, id_: int) -> None:
        runner = self._runner
        if what == "state":
            held: tuple[object, ...] = (runner.slots[id_], runner.positions[id_])
        else:
            held = (runner.kv[id_], runner.beside.get(id_, EMPTY))
        packed = msgspec.msgpack.encode(held)
        row = self._row(what, place)
        row[:4] = len(packed).to_bytes(4, "little")
        row[4 : 4 + len(packed)] = packed

    def _put_up(self, what: str, id_: int, place: int) -> None:
        row = self._row(what, place)
        size = int.from_bytes(row[:4], "little")
        if what == "state":
            state, position = msgspec.msgpack.decode(row[4 : 4 + size], type=tuple[bytes, int])
            self._runner.put_state(id_, state, position)
        else:
            page, beside = msgspec.msgpack.decode(row[4 : 4 + size], type=tuple[list[bytes], bytes])
            self._runner.put_page(id_, page)
            self._runner.beside[id_] = beside

    def _row(self, what: str, place: int) -> memoryview:
        parts = self._host.states if what == "state" else self._host.pages
        return parts.buffers(place)[0]


def host_memory(num_pages: int, num_states: int) -> Arena:
    return Arena(
        pages=ItemTensors(tensors=(torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8),)),
        states=ItemTensors(tensors=(torch.zeros(num_states, STATE_BYTES, dtype=torch.uint8),)),
    )


class FaultyTransfers:
    """Carries out what `tiers` decides for `runner`, with files in `folder`."""

    def __init__(
        self, scheduler: Scheduler, runner: FakeRunner, tiers: Tiers, folder: pathlib.Path
    ) -> None:
        limits = tiers.holdings.limits
        self.host = host_memory(limits.num_host_pages, limits.num_host_states)
        runner.transfers = {}
        runner.filled = lambda *_: None
        self.link = Link(runner, self.host)
        copies = DeviceHostCopies(
            Arena(pages=self.host.pages, states=self.host.states), self.host, self.link, (0, 0)
        )
        self.files = Files(folder, IDENTITY)
        self.files.make()
        self.disk = Disk(self.files, tiers, self.host)
        self.transfers = TierTransfers(scheduler, runner, tiers, copies, self.disk)
        self.threads: tuple[Threads, ...] = (self.disk._readers, self.disk._writer)
        runner.store = lambda store: self.transfers.store([store])
        scheduler.outside.add_keeper(tiers)
        scheduler.outside.add_source(tiers.loads)

    def launch(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self.transfers.load(load)

    def settle(self, rng: random.Random, share: float = 1.0) -> None:
        """Some of what is under way ends, in any order."""
        for threads in self.threads:
            for _ in range(len(threads.jobs)):
                if rng.random() < share:
                    threads.run(rng)
        for _ in range(len(self.link.pending)):
            if rng.random() < share:
                self.link.go_on(rng.randrange(len(self.link.pending)))
        self.transfers.poll()

    @property
    def is_busy(self) -> bool:
        return self.transfers.is_busy or any(threads.jobs for threads in self.threads)


def spoil(folder: pathlib.Path, rng: random.Random) -> None:
    """What others may do to a file, or to all of them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        return
    path = rng.choice(files)
    whole = path.read_bytes()
    how = rng.randrange(7)
    if how == 0:
        for each in rng.sample(files, -(-len(files) // 4)):
            _flip(each, rng)
    elif how == 1:
        os.truncate(path, rng.randrange(len(whole) + 50))
    elif how == 2:
        path.write_bytes(rng.choice(files).read_bytes())
    elif how == 3:
        path.write_bytes(rng.randbytes(rng.randrange(9000)))
    elif how == 4:
        path.unlink()
        path.mkdir()
    elif how == 5:
        shutil.rmtree(
            rng.choice([path.parent, path.parent.parent] if not rng.randrange(9) else [path.parent])
        )
    else:
        path.unlink()


def _flip(path: pathlib.Path, rng: random.Random) -> None:
    """One bit, of the contents for the most part."""
    whole = bytearray(path.read_bytes())
    if whole:
        at = (ALIGNMENT if rng.randrange(4) else 0) + rng.randrange(100)
        whole[at % len(whole)] ^= 1 << rng.randrange(8)
        path.write_bytes(whole)


def patch(monkeypatch: Any, faults: Faults) -> None:
    """Have all that this module stands in for used."""
    faults.patch(monkeypatch)
    monkeypatch.setattr(disk_module, "Threads", Threads)
    for module in (disk_module, finding):
        monkeypatch.setattr(module, "wait", lambda *_, **__: None)
    monkeypatch.setattr(finding, "ROUND_S", 1e-9)
    monkeypatch.setattr(finding, "ceil", lambda _: 32)  # folders with each look
