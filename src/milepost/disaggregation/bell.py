"""Wakes the engine's thread from another one."""

from __future__ import annotations

import select
import socket
from contextlib import suppress


class Bell:
    """May be rung from any thread; `socket` can be read once it has been."""

    def __init__(self) -> None:
        self.socket, self._far = socket.socketpair()
        self.socket.setblocking(False)
        self._far.setblocking(False)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # then it rings already
            self._far.send(b".")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def wait(self) -> None:
        """Waits until the bell rings."""
        select.select([self.socket], [], [])

    def close(self) -> None:
        self.socket.close()
        self._far.close()
