"""Compiles the forms of answers and tokenizes their bad words, in threads beside the steps."""

from __future__ import annotations

import queue
import socket
import threading

from milepost.engine.constraints import CompiledForm
from milepost.engine.loop import Engine
from milepost.engine.processes.wire import Add


class Compiling:
    """Prepares requests in a thread, one after the other; `done` can be read when one is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: queue.SimpleQueue[Add] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[Add, CompiledForm | None, str]] = queue.SimpleQueue()
        self.done, self._bell = socket.socketpair()
        self._pending: set[int] = set()
        self._thread: threading.Thread | None = None

    def begin(self, message: Add) -> None:
        """Begins to prepare a request. The first one starts the thread, which is not waited for at
        the end."""
        self._pending.add(message.number)
        self._wanted.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forms", daemon=True)
            self._thread.start()

    def forget(self, number: int) -> None:
        self._pending.discard(number)

    def close(self) -> None:
        """Stops. A form that is being compiled is left to its thread, which ends with
        the process."""
        self.done.close()
        if self._thread is None:
            self._bell.close()

    def take(self) -> list[tuple[Add, CompiledForm | None, str]]:
        """Returns the requests that are compiled, each with its form or what is wrong with it."""
        self.done.recv(4096)
        found = []
        while not self._made.empty():
            made = self._made.get()
            if made[0].number in self._pending:
                self._pending.discard(made[0].number)
                found.append(made)
        return found

    def _run(self) -> None:
        while True:
            message = self._wanted.get()
            form, problem = None, ""
            if message.number in self._pending:
                try:
                    form = self._engine.prepare(message.params)
                except BaseException as error:  # noqa: BLE001 - a panic in llguidance is one too
                    problem = str(error) or repr(error)
            self._made.put((message, form, problem))
            self._bell.send(b".")
