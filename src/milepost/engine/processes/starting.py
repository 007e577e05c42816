"""Starts the engine's process and ends it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from milepost.config import EngineConfig
from milepost.engine.parent import without_interrupts

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""How engines are started: a fork would inherit threads, and what CUDA has set up."""
STOP_S = 5.0
"""Seconds that the process may take to end before it is killed."""


class EngineProcess:
    """The process of one engine. `make_engine` takes the place of `Engine`, for tests."""

    def __init__(self, config: EngineConfig, make_engine: Callable[..., Any] | None) -> None:
        self._config, self._make_engine = config, make_engine
        self._process: Any = None
        self._starting: asyncio.Future[None] | None = None

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
        arguments = (self._config, theirs, self._make_engine)
        self._process = CONTEXT.Process(target=_run, args=arguments, name="engine")
        self._starting = asyncio.ensure_future(asyncio.to_thread(_start, self._process))
        await asyncio.shield(self._starting)
        theirs.close()
        return ours

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()

    async def join(self) -> None:
        """Waits until the process has ended, for STOP_S at most."""
        await asyncio.to_thread(self._process.join, STOP_S)

    async def end(self) -> None:
        """Waits until the process has ended, and kills it if that takes too long."""
        await self.join()
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    async def end_loading(self) -> None:
        """Kills a process that was never ready: it would first load all weights."""
        if self._starting is not None:
            await self._starting
        if self.pid is not None:
            self._process.kill()
            await self.end()


def _start(process: BaseProcess) -> None:
    resource_tracker.ensure_running()  # its own start lets interrupts through again
    with without_interrupts():
        process.start()


def _run(config: EngineConfig, sock: socket.socket, make_engine: Callable[..., Any] | None) -> None:
    """Runs in the new process. Only there torch is imported, and all that an engine needs."""
    from milepost.engine.processes import engine

    engine.main(config, sock, make_engine or engine.Engine)
