"""Reads through TCP, without engines: what peers may ask for, and what becomes of those who ask
badly or not at all."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading

import msgspec
import numpy as np
import pytest

from milepost.disaggregation import sockets
from milepost.disaggregation.messages import Layout, MemoryRows
from milepost.disaggregation.registered_pools import RegisteredMemory
from milepost.disaggregation.sockets import Sockets
from milepost.disaggregation.transport import TransferError
from milepost.kv_config import KVTransferConfig
from tests.waiting import until

NUM_PAGES, NUM_SLOTS = 5, 2
ALL = tuple(range(NUM_PAGES))
LEASE, OTHER = "0" * 31 + "1", "0" * 31 + "2"


@pytest.fixture
def memory():
    """Pages of 8 bytes and slots of 16, the n-th of all pieces filled with n."""
    sizes = [8] * NUM_PAGES + [16] * NUM_SLOTS
    return np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)


@contextlib.contextmanager
def sockets_of(memory, peers=("127.0.0.1",)):
    address = memory.ctypes.data
    pages = MemoryRows(address, 8, 8, NUM_PAGES)
    slots = MemoryRows(address + 8 * NUM_PAGES, 16, 16, NUM_SLOTS)
    layout = Layout(pages=[pages], slots=[slots])
    ranges = [(address, memory.nbytes)]
    extra = {"transport": "socket", "peers": peers, "timeout_s": 5.0}
    config = KVTransferConfig(kv_connector_extra_config=extra)
    own = Sockets(RegisteredMemory(layout=layout, ranges=ranges, device=None), config)
    own.lend(LEASE, ALL, 0)
    own.lend(OTHER, ALL[:2], 1)
    try:
        yield own
    finally:
        own.close()


def connected(own):
    return socket.create_connection(own._listening.getsockname()[:2], timeout=10)


def asked(num, *numbers, lease=LEASE):
    return bytes.fromhex(lease) + struct.pack(f"<I{len(numbers)}I", num, *numbers)


def replied(own, num, *numbers, lease=LEASE):
    """All that is sent to who asks for `num` pieces, and names these."""
    with connected(own) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(asked(num, *numbers, lease=lease))
        return b"".join(iter(lambda: sock.recv(100), b""))
    return b""


def test_all_pieces_that_are_lent_may_be_asked_for(memory):
    read = np.zeros_like(memory)
    with sockets_of(memory) as own, sockets_of(read) as other:
        lent = list(range(NUM_PAGES + 1))
        assert replied(own, len(lent), *lent) == memory[:-16].tobytes()
        reading = other.begin(other.add_peer(own.metadata(), None), LEASE, lent, lent)
        until(lambda: other.is_done(reading))
    assert read[:-16].tobytes() == memory[:-16].tobytes()
    assert not read[-16:].any()


@pytest.mark.parametrize("num", [NUM_PAGES + 2, 2**32 - 1])
def test_more_pieces_than_are_lent_get_nothing(memory, caplog, monkeypatch, num):
    """However many a peer names, no memory is allocated for them."""
    allocated = []

    def noting(size):
        allocated.append(size)
        return bytearray(size)

    monkeypatch.setattr("milepost.disaggregation.sockets.bytearray", noting, raising=False)
    with sockets_of(memory) as own:
        assert replied(own, num) == b""
        assert f"it asks for {num} pieces of memory, of 6" in caplog.text
        assert max(allocated) == 20
        assert replied(own, 1, 5) == bytes([5] * 16), "others are served"


@pytest.mark.parametrize(
    ("lease", "number", "why"),
    [
        (LEASE, 7, "it asks for piece 7 of memory, of 7"),
        (LEASE, 6, "piece 6 of memory, which is not lent to it"),
        (OTHER, 2, "piece 2 of memory, which is not lent to it"),
        (OTHER, 5, "piece 5 of memory, which is not lent to it"),
        ("f" * 32, 0, "it has no lease"),
    ],
)
def test_what_is_not_lent_gets_nothing(memory, caplog, lease, number, why):
    with sockets_of(memory) as own:
        assert replied(own, 2, 0, number, lease=lease) == b""
        assert why in caplog.text
        assert replied(own, 2, 0, 6, lease=OTHER) == bytes(8) + bytes([6] * 16)


def test_nothing_is_read_after_the_end_of_a_lease(memory, monkeypatch):
    """Nor the rest of what was begun before."""
    with sockets_of(memory) as own:
        views = own._pieces.view

        def ending(number):
            if number == 4:
                own.end_loan(LEASE)
            return views(number)

        monkeypatch.setattr(own._pieces, "view", ending)
        assert replied(own, 2, 3, 4) == b""
        assert replied(own, 1, 3) == b""
        assert replied(own, 1, 1, lease=OTHER) == bytes([1] * 8)


def test_who_is_no_peer_gets_nothing(memory, caplog):
    with sockets_of(memory, peers=["10.0.0.0/8", "::1"]) as own:
        assert replied(own, 1, 0) == b""
    assert "a reader of KV pages is no peer: 127.0.0.1" in caplog.text


def test_connections_that_say_nothing_end_and_hold_nobody_up(memory, monkeypatch):
    monkeypatch.setattr(sockets, "HEAD_S", 0.2)
    monkeypatch.setattr(sockets, "MAX_READERS", 3)
    with sockets_of(memory) as own, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(own)) for _ in range(8)]
        silent[1].sendall(asked(2)[:7])
        silent[2].sendall(asked(2, 0))
        assert replied(own, 1, 3) == bytes([3] * 8), "it waited for its turn"
        assert all(sock.recv(1) == b"" for sock in silent)
        until(lambda: not own._serving)


@pytest.mark.parametrize("short_of", [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED])
def test_a_connection_that_cannot_be_accepted_ends_nothing(memory, monkeypatch, short_of):
    monkeypatch.setattr(sockets, "REST_S", 0.01)
    with sockets_of(memory) as own:
        listening, failures = own._listening, [OSError(short_of, "on purpose")] * 3

        class Failing:
            def accept(self):
                if failures:
                    raise failures.pop()
                return listening.accept()

            def __getattr__(self, name):
                return getattr(listening, name)

        own._listening = Failing()
        for number in (1, 2):  # the first is accepted by the call that has begun
            assert replied(own, 1, number) == bytes([number] * 8)
        assert not failures


@pytest.mark.parametrize("who", ["the reader", "who is read from"])
def test_threads_that_cannot_be_started_are_an_error_of_that_read(memory, monkeypatch, who):
    read = np.zeros_like(memory)
    monkeypatch.setattr(sockets, "REST_S", 0.01)
    with sockets_of(memory) as own, sockets_of(read) as other:
        peer, start = other.add_peer(own.metadata(), None), threading.Thread.start
        blamed = sockets.SocketReading.run if who == "the reader" else sockets.Sockets._send

        def fail(thread):
            if thread._target.__func__ is blamed:
                raise RuntimeError("can't start new thread")
            start(thread)

        def read_it():
            reading = other.begin(peer, LEASE, [0, 1], [0, 1])
            until(lambda: other.is_done(reading))

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(TransferError):
                read_it()
        read_it()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "the other engine went away"),
        (bytes(15), "the other engine went away"),
        (bytes(17), "more was sent than was asked for"),
    ],
)
def test_anything_but_a_complete_read_is_an_error(memory, sent, why):
    with sockets_of(memory) as own, socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            sock, _ = listening.accept()
            with sock:
                sock.recv(100)
                sock.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        peer = own.add_peer(msgspec.msgpack.encode(listening.getsockname()), None)
        reading = own.begin(peer, LEASE, [0, 1], [0, 1])
        thread.join()
        with pytest.raises(TransferError, match=why):
            until(lambda: own.is_done(reading))


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\xff", ["127.0.0.1", 0], ["127.0.0.1", 2**16], ["10.0.0.1", 80], ["localhost", 80]],
)
def test_an_address_that_is_no_peers_is_refused(memory, metadata):
    if not isinstance(metadata, bytes):
        metadata = msgspec.msgpack.encode(metadata)
    with sockets_of(memory) as own, pytest.raises(TransferError):
        own.add_peer(metadata, None)
