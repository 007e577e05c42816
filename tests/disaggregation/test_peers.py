"""How many other engines are known at a time."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest
import zmq

from milepost.disaggregation import peers as peers_module
from milepost.disaggregation.peers import SPARE_S, Peers
from milepost.disaggregation.transport import TransferError
from milepost.kv_config import PeerNetworks
from milepost.zeromq import received_from
from tests.disaggregation.test_faults import hello


class Known:
    """Peers of which nobody answers, unless a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.context = zmq.Context()
        allowed = PeerNetworks.read(["127.0.0.0/8"])
        self.peers = Peers(self.context, hello(), Mock(), allowed, 10.0, lambda: self.now)

    def at(self, port, *, is_known=True):
        peer = self.peers.at("127.0.0.1", port)
        if is_known:
            peer._is_known = True
            peer.asked.clear()
        return peer


@pytest.fixture
def known():
    own = Known()
    yield own
    own.peers.close()
    own.context.term()


def test_one_that_nobody_asks_makes_room_for_another(known, monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    first, second = known.at(1), known.at(2)
    with pytest.raises(TransferError, match="2 other engines are asked already"):
        known.at(3)
    known.now = SPARE_S + 10.5
    second.used_at = known.now
    known.at(3)
    assert (first.is_over, second.is_over) == (True, False)


def test_one_that_has_not_answered_makes_room_for_another(known, monkeypatch):
    """And what was asked of it ends at once."""
    monkeypatch.setattr(peers_module, "MAX_UNKNOWN", 2)
    told = []
    peers = [known.at(port, is_known=False) for port in (1, 2)]
    for peer in peers:
        peer.ask(Mock(), told.append)
    known.at(3)
    assert [peer.is_over for peer in peers] == [True, False]
    assert told == ["it has not answered, and others are asked"]
    assert known.peers.find("127.0.0.1", 1) is None


def test_an_address_of_no_peer_is_not_connected_to(known):
    with pytest.raises(TransferError, match=r"10\.0\.0\.1 is no peer's address"):
        known.peers.at("10.0.0.1", 1)
    assert not list(known.peers.sockets)


def test_an_engine_that_is_gone_is_let_go_of_once_nothing_can_be_read(known):
    """Else its connection would be tried again, and the thread be woken, for hours."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = known.at(listening.getsockname()[1])
    for now, is_over in ((9.0, False), (11.0, True)):
        known.now = now
        assert peer.monitor.poll(10_000), "its connection is tried again"
        known.peers.read(peer.monitor)
        assert peer.is_over == is_over
    assert not list(known.peers.sockets)


def test_a_message_of_this_process_has_no_address():
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://here")
        two.connect("inproc://here")
        two.send_multipart([b"a", b"b"])
        assert received_from(one) == ("here", [b"a", b"b"])
