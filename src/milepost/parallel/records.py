"""Messages between ranks over a socket: frames of bytes, each after its length (four bytes,
big-endian)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

_LENGTH = struct.Struct(">I")


def send(sock: socket.socket, body: bytes) -> None:
    """One frame. Raises OSError if nobody takes it."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def received(sock: socket.socket) -> Iterator[bytes]:
    """Frames, to the connection's end."""
    with sock.makefile("rb") as file:
        while (body := _next(file.read)) is not None:
            yield body


def receive(sock: socket.socket) -> bytes | None:
    """The next frame, and nothing of those behind it; None at the connection's end."""

    def read(num: int) -> bytes:
        found = b""
        while len(found) < num and (piece := sock.recv(num - len(found))):
            found += piece
        return found

    with suppress(OSError):
        return _next(read)
    return None


def _next(read: Callable[[int], bytes]) -> bytes | None:
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = read(length)
    return body if len(body) == length else None
