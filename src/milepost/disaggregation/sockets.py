"""Reads other engines' memory through TCP: for main memory, on machines that lack NIXL.

A thread of the sender serves the requested pieces; a thread of the reader writes them where they
belong. A request is the number of pieces and their numbers, as uint32. Who asks for more pieces
than there are, or for one that is not there, gets nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from milepost.disaggregation.memory import RegisteredMemory
from milepost.disaggregation.messages import Layout, MemoryRows
from milepost.disaggregation.transport import TransferError
from milepost.errors import ConfigError

logger = logging.getLogger(__name__)

_COUNT = struct.Struct("<I")
CONNECT_S = 5.0


class _Address(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


@dataclass(slots=True, eq=False)
class _Peer:
    address: tuple[str, int]


@dataclass(slots=True, eq=False)
class _Reading:
    sock: socket.socket
    error: str = ""
    over: threading.Event = field(default_factory=threading.Event)


class Sockets:
    """Raises ConfigError for memory of a GPU."""

    name = "socket"

    def __init__(self, memory: RegisteredMemory, host: str) -> None:
        if memory.device is not None:
            raise ConfigError("transport='socket' reads main memory only: use nixl")
        self._views = _views(memory.layout)
        self._num_pieces = sum(row.count for row in (*memory.layout.pages, *memory.layout.slots))
        self._listening = socket.create_server((host, 0))
        self._serving: set[socket.socket] = set()
        threading.Thread(target=self._serve, name="kv pages", daemon=True).start()

    def enter(self) -> None:
        pass

    def metadata(self) -> bytes:
        host, port = self._listening.getsockname()[:2]
        return msgspec.msgpack.encode(_Address(host, port))

    def add_peer(self, metadata: bytes, layout: Layout) -> _Peer:  # noqa: ARG002
        try:
            address = msgspec.msgpack.decode(metadata, type=_Address)
        except msgspec.DecodeError as error:
            raise TransferError(f"no address: {error}") from error
        return _Peer((address.host, address.port))

    def remove_peer(self, peer: _Peer) -> None:
        pass

    def begin(self, peer: _Peer, local: list[int], remote: list[int]) -> _Reading:
        try:
            sock = socket.create_connection(peer.address, timeout=CONNECT_S)
        except OSError as error:
            raise TransferError(str(error)) from error
        sock.settimeout(None)
        reading = _Reading(sock)
        views = [self._views(number) for number in local]
        threading.Thread(target=_read, args=(reading, views, remote), daemon=True).start()
        return reading

    def is_done(self, transfer: _Reading) -> bool:
        if not transfer.over.is_set():
            return False
        if transfer.error:
            raise TransferError(transfer.error)
        return True

    def make_progress(self) -> None:
        pass  # threads do

    def stop_progress(self) -> None:
        pass

    def cancel(self, transfer: _Reading) -> bool:
        with contextlib.suppress(OSError):
            transfer.sock.shutdown(socket.SHUT_RDWR)
        return transfer.over.wait(CONNECT_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for sock in list(self._serving):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # --- of who is read from ----------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                threading.Thread(target=self._send, args=(sock,), daemon=True).start()

    def _send(self, sock: socket.socket) -> None:
        self._serving.add(sock)
        with sock, contextlib.suppress(OSError):
            try:
                for view in [self._views(number) for number in self._asked(sock)]:
                    sock.sendall(view)
            except (ValueError, IndexError) as error:
                logger.warning("a reader of KV pages is refused: %s", error)
        self._serving.discard(sock)

    def _asked(self, sock: socket.socket) -> memoryview:
        """The pieces that a reader wants. Raises ValueError before memory is allocated for more
        than there are."""
        head = bytearray(_COUNT.size)
        _fill(sock, memoryview(head))
        (num,) = _COUNT.unpack(head)
        if num > self._num_pieces:
            raise ValueError(f"it asks for {num} pieces of memory, of {self._num_pieces}")
        asked = bytearray(_COUNT.size * num)
        _fill(sock, memoryview(asked))
        return memoryview(asked).cast("I")


def _views(layout: Layout) -> Callable[[int], memoryview]:
    """By the number of a piece its bytes; what is returned raises IndexError."""
    rows: list[tuple[int, MemoryRows]] = []
    first = 0
    for row in (*layout.pages, *layout.slots):
        rows.append((first, row))
        first += row.count

    def view(number: int) -> memoryview:
        for start, row in rows:
            if start <= number < start + row.count:
                address = row.address + (number - start) * row.stride
                return memoryview((ctypes.c_char * row.length).from_address(address)).cast("B")
        raise IndexError(f"it asks for piece {number} of memory, of {first}")

    return view


def _read(reading: _Reading, views: list[memoryview], remote: list[int]) -> None:
    try:
        with reading.sock as sock:
            sock.sendall(_COUNT.pack(len(remote)) + struct.pack(f"<{len(remote)}I", *remote))
            for view in views:
                _fill(sock, view)
    except OSError as error:
        reading.error = str(error) or repr(error)
    finally:
        reading.over.set()


def _fill(sock: socket.socket, view: memoryview) -> None:
    """Raises ConnectionError if the stream ends before."""
    while view:
        num = sock.recv_into(view)
        if not num:
            raise ConnectionError("the other engine went away")
        view = view[num:]
