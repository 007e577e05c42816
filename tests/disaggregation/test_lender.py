"""What an engine holds for others that ask it: bounded, and forgotten in time."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import pytest
import zmq

from milepost.cache import Cache
from milepost.cache.allocation import Loan
from milepost.disaggregation import finds
from milepost.disaggregation import lender as lender_module
from milepost.disaggregation.finds import PendingFinds
from milepost.disaggregation.leases import Leases
from milepost.disaggregation.lender import Lender
from milepost.disaggregation.messages import (
    ANSWERS,
    ENCODER,
    Asked,
    Beat,
    Claim,
    Declined,
    Find,
    Gone,
    Granted,
    Read,
    Reading,
    Release,
    Released,
    Welcome,
)
from milepost.kv_config import PeerNetworks
from tests.disaggregation.test_faults import hello
from tests.pictured_texts import LENGTHS, picture

LEASES = [f"{number:032x}" for number in range(3)]
FIND = Find(tokens=bytes(8), salt="", least=0)
NO_FINDS = (
    Find(tokens=bytes(7), salt="", least=0),
    Find(tokens=bytes(8), salt="", least=0, pictures=(picture(min(LENGTHS), 1),)),
)


class Asking:
    """Another engine, and the one that it asks, in one thread."""

    def __init__(self) -> None:
        self.now = 0.0
        self.outcomes: list = []
        self.is_ready = True
        self.context = zmq.Context()
        leases = Leases(30.0, lambda: self.now)
        for number, lease in enumerate(LEASES):
            loan = Loan(position=64, pages=(number,), slot=number)
            leases.grant(lease, loan, b"key", b"page", lambda: self.is_ready)
        self.lender = Lender(
            self.context,
            msgspec.structs.replace(hello(), host="127.0.0.1", port=0),
            lambda: b"metadata",
            leases,
            peers=PeerNetworks.read(["127.0.0.1"]),
            timeout_s=10.0,
            clock=lambda: self.now,
            tell=self.outcomes.append,
        )
        self.sockets = [self.connected()]

    def connected(self):
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.lender.hello.port}")
        return socket

    def say(self, message, socket=None):
        """Have the lender take a message."""
        (socket or self.sockets[0]).send_multipart([b"", b"1", ENCODER.encode(message)])
        while not self.lender.socket.poll(0):
            if self.lender.zap.socket.poll(10):
                self.lender.zap.answer()
        self.lender.answer()

    def answer(self, socket=None):
        socket = socket or self.sockets[0]
        assert socket.poll(10_000)
        return ANSWERS.decode(socket.recv_multipart()[2])

    def ask(self, message, socket=None):
        self.say(message, socket)
        return self.answer(socket)

    def close(self):
        for socket in self.sockets:
            socket.close(linger=0)
        self.lender.close()
        self.context.term()


@pytest.fixture
def asking():
    own = Asking()
    own.hello = msgspec.structs.replace(hello(), host="127.0.0.1", port=7)
    assert own.ask(Claim(LEASES[0])) == Declined("say hello first")
    assert isinstance(own.ask(own.hello), Welcome)
    yield own
    own.close()


def test_one_hello_is_answered_and_who_is_forgotten_says_it_again(asking, monkeypatch):
    assert asking.ask(asking.hello) == Declined("it has said hello")
    monkeypatch.setattr(lender_module, "MAX_HELLOS", 1)
    asking.sockets.append(asking.connected())
    assert isinstance(asking.ask(asking.hello, asking.sockets[1]), Welcome)
    assert asking.ask(Claim(LEASES[0])) == Declined("say hello first")


def test_what_is_no_message_is_answered_by_a_hello_only(asking):
    asking.say(7)
    assert asking.ask(Claim(LEASES[0])) == Declined("say hello first")


def test_questions_that_the_engine_has_not_answered_are_few(asking, monkeypatch):
    monkeypatch.setattr(lender_module, "MAX_FINDS", 2)
    asking.say(FIND)
    asking.say(FIND)
    assert asking.ask(FIND) == Gone()
    for asked in asking.outcomes:
        asking.lender.found(asked, Gone())
        assert asking.answer() == Gone()
    asking.say(FIND)
    assert len(asking.outcomes) == 3


def test_claims_that_wait_are_few_and_given_up_in_time(asking, monkeypatch):
    monkeypatch.setattr(lender_module, "MAX_CLAIMS", 2)
    asking.is_ready = False
    asking.say(Claim(LEASES[0]))
    asking.say(Claim(LEASES[1]))
    assert asking.ask(Claim(LEASES[2])) == Declined("2 claims wait")
    asking.now = 10.5
    asking.lender.grant_ready()
    asking.is_ready = True
    assert isinstance(asking.ask(Claim(LEASES[2])), Granted), "nothing came before it"
    assert not asking.lender.begun_at()


def test_only_who_has_a_lease_is_looked_after(asking):
    """Looking takes processor time."""
    asking.say(Reading("f" * 32))
    assert not asking.lender.begun_at()
    asking.say(Reading(LEASES[0]))
    assert asking.lender.begun_at() == [0.0]
    asking.now = 10.5
    assert not asking.lender.begun_at()


def test_a_reader_is_asked_in_turn_if_it_is_a_peer(asking):
    asking.say(Beat(LEASES))
    assert asking.ask(Release(LEASES[0])) == Released(True)
    assert asking.outcomes == [Read(b"page", "127.0.0.1", 7)]
    assert asking.ask(Release(LEASES[0])) == Released(False)
    for place in ({"host": "10.0.0.1"}, {"port": 0}):
        asking.sockets.append(asking.connected())
        elsewhere = msgspec.structs.replace(asking.hello, **place)
        assert isinstance(asking.ask(elsewhere, asking.sockets[-1]), Welcome)
        assert asking.ask(Release(LEASES[len(asking.sockets) - 1]), asking.sockets[-1]).was_valid
    assert len(asking.outcomes) == 1


@pytest.mark.parametrize("find", NO_FINDS, ids=("half a token", "a picture past the end"))
def test_a_question_about_what_is_no_prompt_is_declined(asking, find):
    assert isinstance(asking.ask(find), Declined)
    asking.say(FIND)
    assert [each for each in asking.outcomes if isinstance(each, Asked)]


def test_questions_about_tokens_are_answered_a_few_between_steps(monkeypatch):
    """An engine steps on however much it is asked. It has no prompt longer than its cache."""
    monkeypatch.setattr(finds, "TOKENS_AT_ONCE", 100)
    cache, looked, told, rung = Cache(num_pages=4, num_slots=2, page_size=64), [], [], []
    lending = Mock(grant=lambda chain, _: looked.append(len(chain)))
    own = PendingFinds(cache, lending, lambda asked, answer: told.append((asked, answer)), Mock())
    own._ring = lambda: rung.append(len(told))
    for num_tokens in (64, 64, 257, 10, 30):
        own.add(Asked(b"who", b"1", Find(tokens=bytes(4 * num_tokens), salt="", least=0)))
    own.answer()
    assert (looked, rung) == ([64, 64], [2])
    own.answer()
    assert (looked, rung) == ([64, 64], [2, 3])
    own.answer()
    assert (looked, rung) == ([64, 64, 10, 30], [2, 3])
    assert [answer for _, answer in told] == [Gone()] * 5


def test_questions_beyond_what_may_wait_are_refused_at_once(monkeypatch):
    """However many there are, they take a bounded memory: their salts count too."""
    monkeypatch.setattr(finds, "MOST_WAITING_TOKENS", 100)
    cache, told = Cache(num_pages=4, num_slots=2, page_size=64), []
    tell = lambda asked, _: told.append(asked.number)  # noqa: E731
    waiting = PendingFinds(cache, Mock(grant=lambda *_: None), tell, Mock())
    questions = [
        Asked(b"who", number, Find(tokens=bytes(4 * num), salt=salt, least=0))
        for number, num, salt in (
            (b"1", 60, ""),
            (b"2", 41, ""),
            (b"3", 1, "s" * 160),
            (b"4", 40, ""),
            (b"5", 0, ""),
            (b"6", 100, ""),
        )
    ]
    for question in questions[:5]:
        waiting.add(question)
    assert told == [b"2", b"3", b"5"]
    waiting.answer()
    waiting.add(questions[5])
    waiting.answer()
    assert told == [b"2", b"3", b"5", b"1", b"4", b"6"]


def test_who_is_refused_is_named(asking, caplog):
    asking.sockets.append(asking.connected())
    asking.say(msgspec.structs.replace(asking.lender.hello, version=1), asking.sockets[-1])
    assert isinstance(asking.answer(asking.sockets[-1]), Declined)
    assert "an engine is refused: 127.0.0.1: version 1" in caplog.text
