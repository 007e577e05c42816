"""Exchanges messages between ranks over a socket. A frame is a length (four bytes, big-endian) and
that many bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

_LENGTH = struct.Struct(">I")


def send(sock: socket.socket, body: bytes) -> None:
    """Send one frame. Raises OSError if nobody receives it."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def received(sock: socket.socket) -> Iterator[bytes]:
    """Yields frames until the connection ends."""
    with sock.makefile("rb") as file:
        while (body := _next(file.read)) is not None:
            yield body


def receive(sock: socket.socket) -> bytes | None:
    """Returns the next frame, without reading past it; None at the connection's end."""

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
