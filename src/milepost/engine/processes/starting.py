"""Starts the engine's process, with its tokenizer loading beside it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from milepost import logs
from milepost.config import EngineConfig
from milepost.engine import heap
from milepost.engine.ending import (
    close_on_sigterm,
    end_with_program,
    without_interrupts,
    without_main,
)
from milepost.engine.text import tokenizer_for
from milepost.errors import EngineDeadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from milepost.engine.processes.client import EngineClient


logger = logging.getLogger(__name__)

CONTEXT = multiprocessing.get_context("spawn")
"""How engines are started: a fork would inherit threads, and what CUDA has set up."""
STOP_S = 5.0
"""Seconds that the process may take to end before it is killed, besides those for writing."""


class EngineProcess:
    """The process of one engine. `make_engine` replaces `Engine` in tests. It ends by `end`, or
    with the program (`ending`): it then stops between two steps and writes pending cache items, all
    within `stop_s`."""

    def __init__(self, config: EngineConfig, make_engine: Callable[..., Any] | None) -> None:
        self._config, self._make_engine = config, make_engine
        self._process: Any = None
        self._is_started: Future[None] | None = None
        self._finish: Callable[[], object] = lambda: None
        self.is_ready = threading.Event()
        """Set once the engine has loaded. Before that, the process is killed rather than told to
        end."""
        self.stop_s = STOP_S + config.flush_s

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.exitcode
        if code is None:
            return "its connection closed"
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"

    async def start(self) -> socket.socket:
        """Starts the process. Returns the socket to it."""
        ours, theirs = socket.socketpair()
        given = (self._config, theirs, self._make_engine, logs.current())
        self._process = CONTEXT.Process(target=_run, args=given, name="engine")
        self._is_started = Future()
        # The process is killed when this thread ends, so the thread outlasts the event loop.
        starting = (self._process, theirs, self._is_started)
        threading.Thread(target=_start, args=starting, name="engine-starter", daemon=True).start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._is_started))
        except BaseException:
            ours.close()
            raise
        arguments = (self._process, ours.dup(), self.is_ready, self.stop_s)
        self._finish = end_with_program(self, _finish, *arguments)
        if self._config.cache_dir is not None:
            close_on_sigterm()
        return ours

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()

    async def join(self) -> None:
        """Waits until the process has ended, for `stop_s` at most."""
        await asyncio.to_thread(self._process.join, self.stop_s)

    async def end(self) -> None:
        """Waits until the process has ended, and kills it if that takes too long."""
        await self.join()
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._finish()

    async def end_loading(self) -> None:
        """Kills a process that was never ready: it would first load all weights."""
        if self._is_started is not None:
            await asyncio.wrap_future(self._is_started)
        if self.pid is not None:
            self._process.kill()
            await self.end()


def _start(process: BaseProcess, theirs: socket.socket, is_started: Future[None]) -> None:
    """Starts a process, which has a socket of its own, and waits until it has ended."""
    try:
        resource_tracker.ensure_running()  # its own start lets interrupts through again
        with without_interrupts(), without_main():
            process.start()
    except BaseException as error:  # noqa: BLE001 - the caller has it
        is_started.set_exception(error)
        return
    finally:
        theirs.close()
    is_started.set_result(None)
    wait([process.sentinel])


def _finish(
    process: BaseProcess, sock: socket.socket, is_ready: threading.Event, stop_s: float
) -> None:
    """Tells an engine that its client has gone, and waits until it has ended. What it still sends
    is read, or it would wait for that."""
    end_s = monotonic() + stop_s
    if not is_ready.is_set():
        process.kill()
    with sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while (left_s := end_s - monotonic()) > 0 and select.select([sock], [], [], left_s)[0]:
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(2**16):
                    break
    process.join(max(end_s - monotonic(), 0))
    if process.is_alive():
        process.kill()
        process.join()


def _run(
    config: EngineConfig,
    sock: socket.socket,
    make_engine: Callable[..., Any] | None,
    setup: logs.LogSetup | None,
) -> None:
    """Runs in the new process. Only there are torch and the engine's other dependencies
    imported."""
    if setup is not None:
        logs.set_up(replace(setup, process="engine"))
    try:
        with heap.without_collection():
            from milepost.engine.loop import Engine
            from milepost.engine.processes.engine import main

        main(config, sock, make_engine or Engine)
    except Exception:
        logger.critical("the engine's process failed", exc_info=True)
        raise SystemExit(1) from None


T = TypeVar("T")


class LoadedOnce(Generic[T]):
    """Loads a value at the first call of `get`, and keeps it for later callers in the same event
    loop."""

    def __init__(self, load: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._load = load
        self._loading: asyncio.Task[T] | None = None
        self._is_over = False

    async def get(self) -> T:
        """Returns what was loaded. Others still get it if this call is cancelled. Raises what
        `load` raises, and EngineDeadError after `end` and in another event loop."""
        if self._is_over:
            raise EngineDeadError("the engine was closed: make a new one")
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        if self._loading.get_loop() is not asyncio.get_running_loop():
            raise EngineDeadError("the engine belongs to another event loop: make one for each")
        return await asyncio.shield(self._loading)

    async def end(self) -> T | None:
        """Stops loading. Returns what was loaded, or None if nothing was."""
        self._is_over = True
        loading = self._loading
        if loading is None:
            return None
        loading.cancel()
        await asyncio.wait([loading])
        is_there = not loading.cancelled() and loading.exception() is None
        return loading.result() if is_there else None


async def start_with_tokenizer(client: EngineClient) -> PreTrainedTokenizerBase | None:
    """Starts the engine, and returns its tokenizer; None with skip_tokenizer_init.

    Raises what either raises, without waiting for the engine if the model's folder or tokenizer is
    missing. The client is closed then.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(asyncio.to_thread(tokenizer_for, client.config))
            tasks.create_task(client.start())
    except ExceptionGroup as group:
        await client.close()
        raise group.exceptions[0] from None  # it cancelled the other
    return loading.result()
