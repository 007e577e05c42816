"""Connections to other engines: this one sends a hello, then questions, each with one answer.

An engine that does not answer in time, refuses, sends an invalid answer or breaks off a transfer is
dropped together with all open questions to it. The next question says hello again, since another
engine may listen there by then. Few are known at a time, and even fewer that have not said welcome.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from milepost.disaggregation.messages import (
    ANSWERS,
    ENCODER,
    MAX_ANSWER_BYTES,
    MAX_QUESTION_BYTES,
    BadMessageError,
    Beat,
    Declined,
    Hello,
    Layout,
    PeerAnswer,
    PeerQuestion,
    Reading,
    Welcome,
    decoded,
    endpoint,
)
from milepost.disaggregation.transport import TransferError, Transport
from milepost.kv_config import PeerNetworks
from milepost.zeromq import close, connected, received

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Largest number of peers. Each takes a socket and the transport's resources; one that nobody asks
makes room.
"""
SPARE_S = 60.0
"""A peer makes room for another after this long without a message, if no read is under way."""
MAX_UNKNOWN = 64
"""Largest number of peers that have not said welcome, since requests name their addresses. One
more, and the first is dropped. A live engine answers sooner.
"""
IDLE_S = 6 * 3600.0
"""A peer is dropped after this long without a message: engines come and go, and addresses change.
It is not dropped sooner, since each reconnection costs both sides a file descriptor: UCX keeps the
connection of a closed endpoint until the process ends (NIXL 1.5.1).
"""
HINT_S = 2.0
"""Longest time that a prefill waits to hear what another engine has of its prompt."""
Then = Callable[["PeerAnswer | str"], None]
"""A callback for the answer, or for the reason why there is none."""


class _OpenQuestion(NamedTuple):
    """A question that has no answer yet."""

    deadline: float
    then: Then
    is_hint: bool
    """Whether a missing answer does no harm."""


class Peer:
    """One other engine."""

    def __init__(self, socket: Any, monitor: Any, peers: Peers) -> None:
        self.socket, self.monitor = socket, monitor
        self.engine_id = ""
        self.layout = Layout([], [])
        self.handle: Any = None
        self.asked: dict[bytes, _OpenQuestion] = {}
        """Maps the number of a question to the question, until it is answered."""
        self.used_at = 0.0
        """Time of the last message to it."""
        self._peers = peers
        self._num_asked = 0
        self._is_known = False
        self._over = ""
        """Reason why it was dropped, once it is."""
        self._waiting: list[tuple[PeerQuestion, Then, bool]] = []
        """Questions that wait until it has said welcome."""
        self._send(peers.hello, self._welcomed)

    @property
    def is_over(self) -> bool:
        return bool(self._over)

    @property
    def is_known(self) -> bool:
        """Whether the peer has answered the greeting."""
        return self._is_known

    def ask(self, question: PeerQuestion, then: Then, *, is_hint: bool = False) -> None:
        """Asks a question. If it is only a hint, it is given up soon, and the peer is not dropped
        for that.
        """
        if self._over:
            then(self._over)
        elif self._is_known:
            self._send(question, then, is_hint)
        else:
            self._waiting.append((question, then, is_hint))

    def say(self, what: Beat | Reading) -> None:
        """Sends a message that has no answer."""
        self.used_at = self._peers.now
        if self._is_known and not self._over:
            self._put(b"", ENCODER.encode(what))

    def read(self) -> None:
        """Receives an answer. Raises BadMessageError if it is malformed."""
        frames = received(self.socket)
        if len(frames) != 3:
            raise BadMessageError(f"{len(frames)} frames")
        answer = decoded(ANSWERS, frames[2])
        asked = self.asked.pop(frames[1], None)
        if asked is None:
            return  # the answer is late
        if isinstance(answer, Declined):
            asked.then(answer.why)
            self._peers.drop(self, answer.why)  # the next question says hello again
        else:
            asked.then(answer)

    def end(self, why: str) -> None:
        """Closes the connection and fails all open questions."""
        self._over = why
        close(self.socket, self.monitor)
        if self.handle is not None:
            self._peers.transport.remove_peer(self.handle)
        waiting = [asked.then for asked in self.asked.values()]
        waiting += [then for _, then, _ in self._waiting]
        self.asked, self._waiting = {}, []
        for then in waiting:
            then(why)

    def _send(self, question: PeerQuestion, then: Then, is_hint: bool = False) -> None:
        self.used_at = self._peers.now
        body = ENCODER.encode(question)
        if len(body) > MAX_QUESTION_BYTES:
            then(f"{len(body)} bytes are more than a question may have")
            return
        self._num_asked += 1
        number = self._num_asked.to_bytes(8, "big")
        self.asked[number] = _OpenQuestion(self._peers.deadline(is_hint), then, is_hint)
        self._put(number, body)

    def _put(self, number: bytes, body: bytes) -> None:
        """Sends a message. If too many are queued to an engine, it is discarded, and its answer is
        late.
        """
        with suppress(zmq.Again):
            self.socket.send_multipart([b"", number, body], zmq.NOBLOCK)

    def _welcomed(self, answer: PeerAnswer | str) -> None:
        try:
            self._take_welcome(answer)
        except TransferError as error:
            self._peers.drop(self, str(error))
            return
        self._is_known = True
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._send(*entry)

    def _take_welcome(self, answer: PeerAnswer | str) -> None:
        """Handles a welcome. Raises TransferError unless the peer's memory can be read, piece for
        piece, into this engine's.
        """
        if not isinstance(answer, Welcome):
            known = answer if isinstance(answer, str) else type(answer).__name__
            raise TransferError(f"no welcome: {known}")
        if answer.layout.piece_bytes != self._peers.hello.layout.piece_bytes:
            raise TransferError("pages or states of another size, though it said welcome")
        self.handle = self._peers.transport.add_peer(answer.metadata, answer.layout)
        self.engine_id, self.layout = answer.engine_id, answer.layout


class Peers:
    """Peers by address; connects only to those in `allowed`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        hello: Hello,
        transport: Transport,
        allowed: PeerNetworks,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.hello = hello
        self.transport = transport
        self._context = context
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._clock = clock
        self._known: dict[tuple[str, int], Peer] = {}

    @property
    def sockets(self) -> Iterable[Any]:
        return [each for peer in self._known.values() for each in (peer.socket, peer.monitor)]

    @property
    def next_deadline(self) -> float | None:
        times = [each.deadline for peer in self._known.values() for each in peer.asked.values()]
        return min(times, default=None)

    @property
    def now(self) -> float:
        return self._clock()

    def deadline(self, is_hint: bool) -> float:
        return self._clock() + (min(HINT_S, self._timeout_s) if is_hint else self._timeout_s)

    def at(self, host: str, port: int) -> Peer:
        """Returns the engine at an address; a new one is sent a hello. Raises TransferError."""
        peer = self._known.get((host, port))
        if peer is None:
            if host not in self._allowed:
                raise TransferError(f"{host} is no peer's address")
            self._make_room()
            peer = self._known[host, port] = Peer(*self._connect(host, port), self)
        return peer

    def find(self, host: str, port: int) -> Peer | None:
        """Returns the engine at an address if it has been sent a hello."""
        return self._known.get((host, port))

    def _make_room(self) -> None:
        """Drops a peer if there are many. Raises TransferError if all of them are in use."""
        unknown = [peer for peer in self._known.values() if not peer.is_known]
        if len(unknown) >= MAX_UNKNOWN:
            self.drop(unknown[0], "it has not answered, and others are asked")
        elif len(self._known) >= MAX_PEERS:
            oldest = min(self._known.values(), key=lambda peer: peer.used_at)
            if oldest.asked or self._clock() - oldest.used_at <= SPARE_S + self._timeout_s:
                raise TransferError(f"{MAX_PEERS} other engines are asked already")
            self.drop(oldest, "others are asked")

    def _connect(self, host: str, port: int) -> tuple[Any, Any]:
        try:
            return connected(self._context, endpoint(host, port), MAX_ANSWER_BYTES)
        except zmq.ZMQError as error:  # no file, no memory, or ZeroMQ's limit
            raise TransferError(f"no socket for {host}:{port}: {error}") from error

    def read(self, socket: Any) -> None:
        """Receives an answer. A peer that sends anything else is dropped, and no other peer is."""
        for peer in list(self._known.values()):
            if socket is peer.monitor:
                received(socket)
                if peer.asked or self.now - peer.used_at > self._timeout_s:  # nothing is read
                    self.drop(peer, "it does not answer: its connection is lost, or nobody listens")
            if socket is not peer.socket:
                continue
            try:
                peer.read()
            except BadMessageError as error:
                self.drop(peer, f"it answered what is none of ours: {error}")
            except Exception as error:
                logger.exception("an answer of another engine could not be taken")
                self.drop(peer, f"its answer could not be taken: {error!r}")
            return

    def drop(self, peer: Peer, why: str) -> None:
        for place, known in list(self._known.items()):
            if known is peer:
                del self._known[place]
                peer.end(why)

    def give_up_late(self) -> None:
        """Drops peers that are late with an answer, and peers nobody has asked for a long time."""
        now = self._clock()
        for peer in list(self._known.values()):
            if not peer.asked and now - peer.used_at > IDLE_S + self._timeout_s:
                self.drop(peer, "nothing was asked for long")
                continue
            late = {number: each for number, each in peer.asked.items() if each.deadline <= now}
            if not all(each.is_hint for each in late.values()):
                self.drop(peer, f"no answer within {self._timeout_s:g} seconds")
                continue
            for number in late:
                peer.asked.pop(number).then("no answer so far")

    def close(self) -> None:
        for peer in list(self._known.values()):
            self.drop(peer, "this engine ends")
