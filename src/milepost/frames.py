"""Frames: a length (four bytes, big-endian) and that many bytes. Files of records consist of them,
and so do the messages between our processes over sockets and pipes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

LENGTH = struct.Struct(">I")


def framed(body: bytes) -> bytes:
    """Returns a body as a frame."""
    return LENGTH.pack(len(body)) + body


def read_frames(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yields the bodies of frames up to the end, or up to a frame that was cut short. `read`
    returns as many bytes as it is asked for, and fewer only at the end."""
    while (body := _next(read)) is not None:
        yield body


def receive(sock: socket.socket) -> bytes | None:
    """Returns the body of the next frame without reading past it; None at the connection's end."""

    def read(num: int) -> bytes:
        found = b""
        while len(found) < num and (piece := sock.recv(num - len(found))):
            found += piece
        return found

    with suppress(OSError):
        return _next(read)
    return None


def _next(read: Callable[[int], bytes]) -> bytes | None:
    head = read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = read(length)
    return body if len(body) == length else None
