"""Processes forked from one that has imported what they need: to start Python, torch and
transformers anew takes each of them seconds.

A test that says so starts a server or an engine as users do. For all others it begins where the
imports end.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryFile
from typing import Any

from milepost.__main__ import run
from milepost.engine import child
from milepost.engine.ending import without_main
from milepost.engine.processes import starting
from milepost.models import architectures

NEEDED = [
    "milepost.cli.bench",  # the command line is built with the commands of annexes
    "milepost.cli.main",
    "milepost.cli.simulate",
    "milepost.engine.constraints.process",
    "milepost.engine.media.process",
    "milepost.engine.processes.engine",
    "milepost.engine.text.process",
    "milepost.page.routes",
    "milepost.server.run",
    "tests.forked",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_template_utils",
    "uvloop",
    *(module.name for module in iter_modules(architectures.__path__, f"{architectures.__name__}.")),
]
"""Modules that a server and its engine import: each of them would otherwise do so for a second of
processor time."""


def context() -> ForkServerContext:
    """Returns what takes the place of `starting.CONTEXT`."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(NEEDED)
    return found


class Program:
    """A command line of `milepost` in a forked process, as `subprocess.Popen` would have it. The
    process of its engine is forked too; its id is in `pid_file`. So are those that read texts,
    forms and images.
    """

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str], pid_file: Path
    ) -> None:
        forks = context()
        (out, writes_out), (err, writes_err) = os.pipe(), os.pipe()
        given = _Given(environment, writes_out, writes_err)
        with without_main():
            forkserver.ensure_running()
            address = forkserver._forkserver._forkserver_address
            self._process = forks.Process(target=_run, args=(arguments, given, address, pid_file))
            self._process.start()
        os.close(writes_out)
        os.close(writes_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("milepost", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run_script(path: Path, *arguments: str, compiles: bool = False) -> str:
    """Returns what a script prints in a forked process, as `python path arguments` would. With
    `compiles`, kernels are compiled rather than interpreted."""
    environment = dict(os.environ)
    if compiles:
        environment.pop("TRITON_INTERPRET", None)
    with TemporaryFile() as printed, TemporaryFile() as errors, without_main():
        given = _Given(environment, printed.fileno(), errors.fileno())
        words = [str(path), *arguments]
        process = context().Process(target=_run_script, args=(words, given))
        process.start()
        process.join()
        texts = [os.pread(each.fileno(), 2**26, 0).decode() for each in (printed, errors)]
    assert process.exitcode == 0, texts[1]
    return texts[0]


def _run_script(words: list[str], given: None) -> None:
    _begin()
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


class _Given:
    """Sent to a process, it becomes its environment and its standard output, error and input."""

    def __init__(self, environment: Mapping[str, str], *fds: int) -> None:
        self._environment, self._fds = dict(environment), fds

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (self._environment, *map(reduction.DupFd, self._fds))


def _take(environment: Mapping[str, str], *fds: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, given in zip((1, 2, 0), fds, strict=False):
        own = given.detach()
        os.dup2(own, number)
        if own != number:
            os.close(own)


def _run(arguments: list[str], given: None, address: str, pid_file: Path) -> None:
    forkserver.connect_to_new_process = _Elsewhere(address).connect_to_new_process
    _Engine.pid_file = pid_file
    starting.CONTEXT = _Context()
    child.start_process = start_helper
    sys.argv = ["milepost", *arguments]
    _begin()
    try:
        sys.exit(run())
    finally:
        atexit._run_exitfuncs()


def _begin() -> None:
    # What forks may have begun where Ctrl-C is blocked, or in the background, or under `nohup`.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.freeze()  # what was imported stays, and its pages stay shared


class _Helper:
    """A process of `milepost.engine.child`, as asyncio's subprocess would have it."""

    def __init__(self, process: ForkServerProcess, reads: Any, writes: Any) -> None:
        self._process, self.stdout, self.stdin = process, reads, writes

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int | None:
        await asyncio.to_thread(self._process.join)
        self.stdin.close()
        return self.returncode

    def kill(self) -> None:
        self._process.kill()
        self.stdin.close()


async def start_helper(package: str, words: Sequence[str]) -> _Helper:
    """Takes the place of `child.start_process` where a test need not start Python."""
    ours, theirs = socket.socketpair()
    with theirs, without_main():
        given = _Given(os.environ, theirs.fileno(), 2, theirs.fileno())
        process = context().Process(target=_help, args=(package, words, given), daemon=True)
        process.start()
    return _Helper(process, *await asyncio.open_connection(sock=ours))


def _help(package: str, words: Sequence[str], given: None) -> None:
    os.setsid()
    _begin()
    sys.argv = ["-c", *words]
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has closed it
    importlib.import_module(f"{package}.process").main()


class _Elsewhere(forkserver.ForkServer):
    """The process to fork from, which another program has started and will end."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        _, self._forkserver_alive_fd = os.pipe()

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


class _Engine(ForkServerProcess):
    """Has its parent's environment, and writes where its parent does."""

    pid_file: Path

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._given = _Given(os.environ, 1, 2)

    def start(self) -> None:
        super().start()
        self.pid_file.write_text(str(self.pid))


class _Context(ForkServerContext):
    Process = _Engine
