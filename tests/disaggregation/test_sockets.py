"""Reads through TCP, without engines: what peers may ask for."""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np
import pytest

from milepost.disaggregation.memory import RegisteredMemory
from milepost.disaggregation.messages import Layout, MemoryRows
from milepost.disaggregation.sockets import Sockets
from tests.waiting import until

NUM_PAGES, NUM_SLOTS = 5, 2


@pytest.fixture
def memory():
    """Pages of 8 bytes and slots of 16, the n-th of all pieces filled with n."""
    sizes = [8] * NUM_PAGES + [16] * NUM_SLOTS
    return np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)


@contextlib.contextmanager
def sockets_of(memory):
    address = memory.ctypes.data
    pages = MemoryRows(address, 8, 8, NUM_PAGES)
    slots = MemoryRows(address + 8 * NUM_PAGES, 16, 16, NUM_SLOTS)
    layout = Layout(pages=[pages], slots=[slots])
    ranges = [(address, memory.nbytes)]
    own = Sockets(RegisteredMemory(layout=layout, ranges=ranges, device=None), "127.0.0.1")
    try:
        yield own
    finally:
        own.close()


def replied(own, num, *numbers):
    """All that is sent to who asks for `num` pieces, and names these."""
    with socket.create_connection(own._listening.getsockname()[:2], timeout=10) as sock:
        sock.sendall(struct.pack(f"<I{len(numbers)}I", num, *numbers))
        return b"".join(iter(lambda: sock.recv(100), b""))


def test_all_pieces_may_be_asked_for(memory):
    read = np.zeros_like(memory)
    with sockets_of(memory) as own, sockets_of(read) as other:
        everything = list(range(NUM_PAGES + NUM_SLOTS))
        assert replied(own, len(everything), *everything) == memory.tobytes()
        reading = other.begin(other.add_peer(own.metadata(), None), everything, everything)
        until(lambda: other.is_done(reading))
    assert read.tobytes() == memory.tobytes()


@pytest.mark.parametrize("num", [NUM_PAGES + NUM_SLOTS + 1, 2**32 - 1])
def test_more_pieces_than_there_are_get_nothing(memory, caplog, monkeypatch, num):
    """However many a peer names, no memory is allocated for them."""
    allocated = []

    def noting(size):
        allocated.append(size)
        return bytearray(size)

    monkeypatch.setattr("milepost.disaggregation.sockets.bytearray", noting, raising=False)
    with sockets_of(memory) as own:
        assert replied(own, num) == b""
        assert f"it asks for {num} pieces of memory, of 7" in caplog.text
        assert max(allocated) == 4
        assert replied(own, 1, 6) == bytes([6] * 16), "others are served"


def test_a_piece_that_is_not_there_gets_nothing(memory, caplog):
    with sockets_of(memory) as own:
        assert replied(own, 2, 0, 7) == b""
        assert "it asks for piece 7 of memory, of 7" in caplog.text
        assert replied(own, 1, 0) == bytes(8)
