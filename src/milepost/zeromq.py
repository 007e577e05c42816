"""Limits to what others can have a ZeroMQ socket hold.

Every socket that is reached from outside is `bound`. One thing libzmq does not limit: how many
frames a message has before its last one, all of which it holds; `received` keeps the first ones.
"""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

HANDSHAKE_MS = 5000
"""A connection that has not said by then what it is is closed."""
MAX_UNREAD = 8
"""Messages of a connection that are held before they are read; then its sender waits."""
MAX_FRAMES = 5
MAX_QUEUED = 4096
"""Largest number of messages queued to another engine: more than the number of waiting requests."""

_MAPPED = "::ffff:"
"""The text before an IPv4 address on a socket for both kinds."""

S = TypeVar("S", bound="zmq.Socket[Any]")


def bound(socket: S, *, max_bytes: int, max_queued: int) -> S:
    """Returns the same socket, bounded: it closes a connection that sends a frame of more than
    `max_bytes`, and holds at most `max_queued` unsent messages to each."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    return socket


def between_engines(socket: S, max_bytes: int) -> S:
    """Prepares a socket, IPv6 too, for another engine's messages: `bound`, and closed at once."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    return bound(socket, max_bytes=max_bytes, max_queued=MAX_QUEUED)


def connected(
    context: zmq.Context[Any], address: str, max_bytes: int
) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    """Returns a socket that asks another engine, and one with a message whenever the connection is
    lost or cannot be made; close both. Raises ZMQError."""
    socket: zmq.Socket[Any] = between_engines(context.socket(zmq.DEALER), max_bytes)
    try:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            close(socket, monitor)
            raise
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket, monitor


def bell_pair(context: zmq.Context[Any]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Returns a pair of sockets for one context's thread: what is sent to the first, which never
    waits, wakes the thread, which listens to the other."""
    bell, ear = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (bell, ear):
        socket.set_hwm(0)
    ear.bind("inproc://bell")
    bell.connect("inproc://bell")
    return bell, ear


def close(socket: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
    """Closes both sockets of a connection."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)


def received(socket: zmq.Socket[Any]) -> list[bytes]:
    """Returns the first frames of the next message; the others are read and dropped."""
    return received_from(socket)[1]


def received_from(socket: zmq.Socket[Any]) -> tuple[str, list[bytes]]:
    """Returns the address of the next message's sender, if it has one, and its first frames; the
    others are read and dropped."""
    first = socket.recv(copy=False)
    frames = [first.bytes]
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv()
        if len(frames) < MAX_FRAMES:
            frames.append(frame)
    try:
        address = str(first.get("Peer-Address"))
    except zmq.ZMQError:  # a peer on this machine or in this process
        address = "here"
    return address.removeprefix(_MAPPED), frames
