"""Compiles the forms of answers and tokenizes their bad words, in a thread beside the steps."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from contextlib import suppress

from milepost.engine.constraints import CompiledForm
from milepost.engine.loop import Engine
from milepost.engine.processes.wire import Add
from milepost.tiers.threads import Threads


class Compiling:
    """Prepares requests in a thread, one after the other; `done` can be read when one is. The first
    request starts the thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = Threads(1, "forms")
        self._pending: dict[int, tuple[Add, Future[CompiledForm | None]]] = {}
        self.done, self._bell = socket.socketpair()

    def begin(self, message: Add) -> None:
        """Begins to prepare a request."""
        prepared = self._thread.submit(self._engine.prepare, message.params)
        self._pending[message.number] = message, prepared
        prepared.add_done_callback(self._ring)

    def _ring(self, _prepared: Future[CompiledForm | None]) -> None:
        with suppress(OSError):  # closed meanwhile
            self._bell.send(b".")

    def forget(self, number: int) -> None:
        """Drops a request, and does not prepare it if that has not begun."""
        if number in self._pending:
            _, prepared = self._pending.pop(number)
            prepared.cancel()

    def close(self) -> None:
        """Stops. A form that is being compiled is left to its thread, which ends with
        the process."""
        self._thread.close()
        self.done.close()
        self._bell.close()

    def take(self) -> list[tuple[Add, CompiledForm | None, str]]:
        """Returns the requests that are prepared, each with its form or an error message."""
        self.done.recv(4096)
        made = [number for number, (_, prepared) in self._pending.items() if prepared.done()]
        return [_outcome(*self._pending.pop(number)) for number in made]


def _outcome(
    message: Add, prepared: Future[CompiledForm | None]
) -> tuple[Add, CompiledForm | None, str]:
    if prepared.cancelled():
        return message, None, "the system has no thread to compile it"
    error = prepared.exception()  # a panic in llguidance is no Exception
    if error is not None:
        return message, None, str(error) or repr(error)
    return message, prepared.result(), ""
