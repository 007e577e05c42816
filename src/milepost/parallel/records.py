"""What the first rank tells the others over a socket: frames of so many bytes, each after its
length (4 bytes, big-endian)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct(">I")


def send(sock: socket.socket, body: bytes) -> None:
    """One frame. Raises OSError if nobody takes it."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def received(sock: socket.socket) -> Iterator[bytes]:
    """Frames, to the connection's end."""
    with sock.makefile("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            body = file.read(length)
            if len(body) < length:
                return
            yield body
