"""The reading side of the transport over TCP: one connection, in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

CONNECT_S = 5.0


@dataclass(slots=True, eq=False)
class SocketReading:
    """A read by one thread, which calls `run`."""

    error: str = "it was not read to its end"
    """Empty once everything has arrived."""
    over: threading.Event = field(default_factory=threading.Event)
    _sock: socket.socket | None = None
    _is_cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        sock = socket.create_connection(address, timeout=min(CONNECT_S, timeout_s))
        sock.settimeout(timeout_s)
        with self._lock:
            if self._is_cancelled:
                sock.close()
                raise ConnectionError("it was given up")
            self._sock = sock
        return sock

    def cancel(self) -> bool:
        """Cancels the read. Returns whether nothing writes any more."""
        with self._lock:
            self._is_cancelled = True
            if self._sock is None:
                return True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        return self.over.wait(CONNECT_S)

    def run(
        self, address: tuple[str, int], request: bytes, views: list[memoryview], timeout_s: float
    ) -> None:
        """Sends a request and fills the views with what comes."""
        try:
            with self.connect(address, timeout_s) as sock:
                sock.sendall(request)
                for view in views:
                    fill(sock, view)
                if sock.recv(1):
                    raise ConnectionError("more was sent than was asked for")
            self.error = ""
        except Exception as error:  # noqa: BLE001 - anything but a complete read is an error
            self.error = str(error) or repr(error)
        finally:
            self.over.set()


def fill(sock: socket.socket, view: memoryview, end_s: float | None = None) -> None:
    """Fills `view` from a socket. Raises ConnectionError if the stream ends early, and TimeoutError
    at `end_s`.
    """
    while view:
        if end_s is not None:
            sock.settimeout(seconds_left(end_s))
        num = sock.recv_into(view)
        if not num:
            raise ConnectionError("the other engine went away")
        view = view[num:]


def seconds_left(end_s: float) -> float:
    """Returns the seconds until `end_s`. Raises TimeoutError if it has passed."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s
