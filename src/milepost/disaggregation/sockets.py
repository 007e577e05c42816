"""Reads other engines' memory through TCP: for main memory, on machines that lack NIXL.

A thread of the sender serves the requested pieces; a thread of the reader writes them to their
places. A request is the lease (16 bytes), the number of pieces and their numbers, as uint32. A
reader that asks for more than its lease covers gets nothing, and nothing is sent after its lease
ends. A read is complete if all pieces came, and nothing after them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time

import msgspec

from milepost.disaggregation.messages import BadMessageError, Layout, decoded
from milepost.disaggregation.registered_pools import PieceViews, RegisteredMemory
from milepost.disaggregation.socket_reading import SocketReading, fill, seconds_left
from milepost.disaggregation.transport import TransferError, Transport
from milepost.disaggregation.zap import ThrottledWarnings
from milepost.errors import ConfigError
from milepost.kv_config import KVTransferConfig

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<16sI")
HEAD_S = 5.0
"""Seconds after which a connection that has not sent its request is closed."""
REST_S = 0.1
"""Pause between two attempts to accept a connection when files or memory are short."""
MAX_READERS = 256
"""Largest number of connections served at a time, with a thread for each; others wait."""


class _Address(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


_ADDRESSES = msgspec.msgpack.Decoder(_Address)


_Lent = tuple[frozenset[int], ...]
"""Ids that are lent, by kind: see `Layout.kinds`."""


class _RefusedError(Exception):
    """A reader asks for memory that is not lent to it."""


class Sockets(Transport):
    """A transport over TCP, whose threads make progress by themselves. Raises ConfigError for GPU
    memory, or an address that cannot be used."""

    name = "socket"

    def __init__(self, memory: RegisteredMemory, config: KVTransferConfig) -> None:
        if memory.device is not None:
            raise ConfigError("transport='socket' reads main memory only: use nixl")
        self._pieces = PieceViews(memory.layout)
        self._peers, self._timeout_s = config.exchange.peers, config.exchange.timeout_s
        self._listening = _listening(config.kv_ip)
        self._lock = threading.Lock()
        self._lent: dict[bytes, _Lent] = {}
        self._serving: set[socket.socket] = set()
        self._room = threading.BoundedSemaphore(MAX_READERS)
        self._closing = threading.Event()
        self._warnings = ThrottledWarnings(time.monotonic)
        threading.Thread(target=self._serve, name="kv pages", daemon=True).start()

    def metadata(self) -> bytes:
        host, port = self._listening.getsockname()[:2]
        return msgspec.msgpack.encode(_Address(host, port))

    def add_peer(self, metadata: bytes, layout: Layout) -> tuple[str, int]:  # noqa: ARG002
        try:
            address = decoded(_ADDRESSES, metadata)
        except BadMessageError as error:
            raise TransferError(f"no address: {error}") from error
        if address.host not in self._peers or not 0 < address.port < 2**16:
            raise TransferError(f"{address.host!r}, port {address.port}: no peer's address")
        return address.host, address.port

    def begin(
        self, peer: tuple[str, int], lease: str, local: list[int], remote: list[int]
    ) -> SocketReading:
        views = [self._pieces.view(number) for number in local]
        request = _HEAD.pack(bytes.fromhex(lease), len(remote))
        request += struct.pack(f"<{len(remote)}I", *remote)
        reading = SocketReading()
        given = peer, request, views, self._timeout_s
        try:
            threading.Thread(target=reading.run, args=given, daemon=True).start()
        except RuntimeError as error:
            raise TransferError(f"no thread to read with: {error}") from error
        return reading

    def is_done(self, transfer: SocketReading) -> bool:
        if not transfer.over.is_set():
            return False
        if transfer.error:
            raise TransferError(transfer.error)
        return True

    def cancel(self, transfer: SocketReading) -> bool:
        return transfer.cancel()

    def lend(
        self, lease: str, pages: tuple[int, ...], slot: int | None, windows: tuple[int, ...] = ()
    ) -> None:
        slots = () if slot is None else (slot,)
        with self._lock:
            self._lent[bytes.fromhex(lease)] = tuple(map(frozenset, (pages, slots, windows)))

    def end_loan(self, lease: str) -> None:
        with self._lock:
            self._lent.pop(bytes.fromhex(lease), None)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            serving = list(self._serving)
        for sock in serving:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # --- of who is read from ----------------------------------------------------------------------

    def _serve(self) -> None:
        """Accepts connections until `close`, whatever becomes of any."""
        while not self._closing.is_set():
            self._room.acquire()
            sock = self._accepted()
            try:
                if sock is not None:
                    threading.Thread(target=self._send, args=(sock,), daemon=True).start()
                    continue
            except RuntimeError as error:
                self._rest(error)
                assert sock is not None, "a thread was to serve it"
                sock.close()
            self._room.release()

    def _accepted(self) -> socket.socket | None:
        try:
            sock, (host, *_) = self._listening.accept()
        except OSError as error:
            self._rest(error)
            return None
        if host in self._peers:
            return sock
        self._warnings.warn("a reader of KV pages is no peer", host)
        sock.close()
        return None

    def _rest(self, error: Exception) -> None:
        """Waits a while when files, threads or memory are short: other connections may end soon."""
        if not self._closing.is_set():
            self._warnings.warn("a reader of KV pages could not be accepted", error)
            self._closing.wait(REST_S)

    def _send(self, sock: socket.socket) -> None:
        with self._lock:
            self._serving.add(sock)
        with sock:
            try:
                self._answer(sock)
            except OSError:
                pass  # the reader went away, or sent nothing for too long
            except _RefusedError as error:
                self._warnings.warn("a reader of KV pages is refused", error)
            except Exception:
                logger.exception("a reader of KV pages could not be served")
        with self._lock:
            self._serving.discard(sock)
        self._room.release()

    def _answer(self, sock: socket.socket) -> None:
        lease, views = self._asked(sock)
        end_s = time.monotonic() + self._timeout_s
        for view in views:
            if lease not in self._lent:
                raise _RefusedError("its lease has ended")
            sock.settimeout(seconds_left(end_s))
            sock.sendall(view)

    def _asked(self, sock: socket.socket) -> tuple[bytes, list[memoryview]]:
        """Receives a reader's request and returns its lease and pieces. Raises _RefusedError,
        before memory is allocated for more pieces than are lent.
        """
        end_s = time.monotonic() + HEAD_S
        head = bytearray(_HEAD.size)
        fill(sock, memoryview(head), end_s)
        lease, num = _HEAD.unpack(head)
        with self._lock:
            lent = self._lent.get(lease)
        if lent is None:
            raise _RefusedError("it has no lease")
        most = self._pieces.num_of(*map(len, lent))
        if num > most:
            raise _RefusedError(f"it asks for {num} pieces of memory, of {most}")
        asked = bytearray(4 * num)
        fill(sock, memoryview(asked), end_s)
        return lease, [self._lent_view(lent, number) for number in memoryview(asked).cast("I")]

    def _lent_view(self, lent: _Lent, number: int) -> memoryview:
        try:
            kind, id_ = self._pieces.owner(number)
        except IndexError as error:
            raise _RefusedError(str(error)) from error
        if id_ not in lent[kind]:
            raise _RefusedError(f"it asks for piece {number} of memory, which is not lent to it")
        return self._pieces.view(number)


def _listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise ConfigError(f"kv_transfer_config: cannot use kv_ip={host!r}: {error}") from error
