"""The thread that speaks with other engines: answers their questions, asks its own, and has pieces
of their memory read.

A pull goes: say hello, once to each engine; claim the lease and compare what it is of with what is
wanted; read; ask whether the lease was valid all along. Whatever goes wrong on the way ends it with
one reason, and only once nobody writes here any more. The engine's thread takes what has come of
pulls when the bell has rung.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from milepost.disaggregation.leases import Leases
from milepost.disaggregation.memory import pieces_of
from milepost.disaggregation.messages import (
    ENCODER,
    QUESTIONS,
    Answer,
    Beat,
    Claim,
    Declined,
    Find,
    Gone,
    Granted,
    Hello,
    Release,
    Released,
    Welcome,
    misfit,
)
from milepost.disaggregation.params import Remote
from milepost.disaggregation.peers import Peer, Peers
from milepost.disaggregation.transport import TransferError, Transport
from milepost.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S = (50e-6, 1e-3)
"""Between two looks at what is being read, least and most: what has taken long is looked at less
often."""
LOOKS = 16
"""The time between two looks is so small a part of what a transfer has taken so far."""
MAX_HELLOS = 4096
"""Connections of others that are remembered; one that is not says hello again."""
BEATS = 6
"""Heartbeats in the time of a lease."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """What a request of this engine lacks: pages `first` and following of those that are lent,
    into `pages`, and the state into `slot`.
    """

    number: int
    remote: Remote
    key: bytes
    """Of the state that is wanted."""
    first: int
    pages: tuple[int, ...]
    slot: int | None
    num_bytes: int = 0
    asked_at: float = 0.0
    peer: Peer | None = None
    transfer: Any = None
    began_at: float = 0.0
    deadline: float = 0.0
    problem: str = ""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """What has come of a pull: all of it, or a problem."""

    number: int
    problem: str
    num_bytes: int
    seconds: float
    """From the request for it until it was certain."""


@dataclass(frozen=True, slots=True)
class Read:
    """Another engine has what was lent under a lease, and is asked there."""

    lease: str
    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoteMatch:
    """What another engine has of the tokens that were asked for; None for nothing of use."""

    number: int
    remote: Remote | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Another engine asks what there is of these tokens; to be answered with `Links.tell`."""

    who: bytes
    number: bytes
    find: Find


Outcome = Pulled | Read | RemoteMatch | Asked


@dataclass(slots=True)
class _State:
    """What only the thread changes."""

    pulls: list[Pull] = field(default_factory=list)
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Leases elsewhere that are still wanted, and where."""
    hellos: dict[bytes, Hello] = field(default_factory=dict)
    """Who asks here."""
    readers: dict[str, float] = field(default_factory=dict)
    """Leases that somebody may be reading under, and since when."""
    ended: list[threading.Event] = field(default_factory=list)
    """Of those who wait until nothing is pulled."""
    beat_at: float = 0.0
    rung_for: float | None = None
    """The end of a lease that the engine has been told of."""


class Links:
    """Raises ConfigError where the address cannot be had. `close` it at the end."""

    def __init__(
        self,
        hello: Hello,
        transport: Transport,
        leases: Leases,
        *,
        timeout_s: float,
        lease_s: float,
        clock: Callable[[], float],
        ring: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._timeout_s = timeout_s
        self._beat_s = lease_s / BEATS
        self._clock = clock
        self._ring = ring
        self._context = zmq.Context()
        self._server = self._context.socket(zmq.ROUTER)
        try:
            port = self._bind(hello)
        except ConfigError:
            self._server.close(linger=0)
            self._context.term()
            raise
        self.hello = msgspec.structs.replace(hello, port=port)
        self._peers = Peers(self._context, self.hello, transport, timeout_s, clock)
        self._commands: deque[Callable[[], None]] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._bell, self._ear = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._ear.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._state = _State()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="kv links", daemon=True)
        self._thread.start()

    # --- of the engine's thread -------------------------------------------------------------------

    def hold(self, remote: Remote) -> None:
        """Tell the other engine from time to time that this lease is still wanted."""
        where = (remote.host, remote.port)
        self._command(lambda: self._state.held.__setitem__(remote.lease, where))

    def release(self, remote: Remote) -> None:
        """It is not wanted any more."""
        self._command(lambda: self._release(remote))

    def pull(self, pull: Pull) -> None:
        """Begin one; it ends with a `Pulled`."""
        self._command(lambda: self._begin(pull))

    def end_pulls(self) -> None:
        """Give up what is being read; returns when nobody writes any more."""
        ended = threading.Event()
        self._command(lambda: self._give_up_pulls(ended))
        ended.wait()

    def find(self, number: int, where: tuple[str, int], find: Find) -> None:
        """Ask another engine; that ends with a `RemoteMatch`."""
        self._command(lambda: self._find(number, where, find))

    def tell(self, asked: Asked, answer: Granted | Gone) -> None:
        """Answer another engine."""
        self._command(lambda: self._reply(asked.who, asked.number, answer))

    def take(self) -> list[Outcome]:
        """What has come since the last call."""
        found: list[Outcome] = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        return found

    def close(self) -> None:
        """End the thread; what is being read is given up."""
        self._command(self._stop)
        self._thread.join()
        self._bell.close()
        for socket in (self._ear, self._server):
            socket.close(linger=0)
        self._peers.close()
        self._context.term()

    def _command(self, do: Callable[[], None]) -> None:
        self._commands.append(do)
        self._bell.send(b"")

    def _bind(self, hello: Hello) -> int:
        try:
            if hello.port:
                self._server.bind(f"tcp://{hello.host}:{hello.port}")
                return hello.port
            return self._server.bind_to_random_port(f"tcp://{hello.host}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_transfer_config: cannot use {hello.host}:{hello.port}: {error}"
            ) from error

    # --- of its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        self._transport.enter()
        while self._is_open:
            poller = zmq.Poller()
            sockets = [self._ear, self._server, *self._peers.sockets]
            for socket in sockets:
                poller.register(socket, zmq.POLLIN)
            look_s = self._look_s()
            if look_s is not None:
                time.sleep(look_s)
            for socket, _ in poller.poll(self._wait_ms() if look_s is None else 0):
                if socket is self._ear:
                    self._obey()
                elif socket is self._server:
                    self._answer()
                else:
                    self._peers.read(socket)
            if self._state.readers:
                self._transport.go_on()
            self._look_at_pulls()
            self._peers.give_up_late()
            self._beat()
            self._note_ends()

    def _note_ends(self) -> None:
        """Wake the engine for a lease that is over, once."""
        next_end = self._leases.next_end
        if next_end is not None and next_end <= self._clock() and next_end != self._state.rung_for:
            self._state.rung_for = next_end
            self._ring()

    def _look_s(self) -> float | None:
        """Until the next look at what is being read, here or from here; None if nothing is."""
        state, now = self._state, self._clock()
        for lease, since in list(state.readers.items()):
            if now - since > self._timeout_s:  # whoever it was has given up
                del state.readers[lease]
        begun = [pull.began_at for pull in state.pulls if pull.transfer is not None]
        youngest = max((*begun, *state.readers.values()), default=None)
        if youngest is None:
            return None
        least, most = LOOK_S
        return min(max((now - youngest) / LOOKS, least), most)

    def _wait_ms(self) -> float | None:
        next_end = self._leases.next_end
        waits = [self._peers.next_deadline, next_end if next_end != self._state.rung_for else None]
        if self._state.held:
            waits.append(self._state.beat_at)
        known = [at for at in waits if at is not None]
        return max(min(known) - self._clock(), 0.0) * 1000 + 1 if known else None

    def _obey(self) -> None:
        self._ear.recv()
        while self._commands:
            self._commands.popleft()()

    def _stop(self) -> None:
        self._is_open = False
        for pull in self._state.pulls:
            if pull.transfer is not None:
                self._transport.give_up(pull.transfer)

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._ring()

    # --- questions of others ----------------------------------------------------------------------

    def _answer(self) -> None:
        who, *rest = self._server.recv_multipart()
        try:
            _, number, body = rest
            question = QUESTIONS.decode(body)
        except (ValueError, msgspec.DecodeError) as error:
            logger.warning("a question that is none of ours: %s", error)
            return
        state = self._state
        match question:
            case Hello():
                problem = misfit(question, self.hello)
                if problem:
                    logger.warning("engine %s is refused: %s", question.engine_id, problem)
                    self._reply(who, number, Declined(problem))
                    return
                if len(state.hellos) >= MAX_HELLOS:
                    del state.hellos[next(iter(state.hellos))]
                state.hellos[who] = question
                self._reply(who, number, self._welcome())
            case _ if who not in state.hellos:
                self._reply(who, number, Declined("say hello first"))
            case Claim(lease=id_):
                granted = self._granted(id_)
                if isinstance(granted, Granted):
                    state.readers[id_] = self._clock()
                self._reply(who, number, granted)
            case Beat(leases=ids):
                self._leases.prolong(ids)
            case Release(lease=id_):
                state.readers.pop(id_, None)
                was_valid = self._leases.release(id_)
                self._reply(who, number, Released(was_valid))
                hello = state.hellos[who]
                if was_valid:
                    self._tell(Read(id_, hello.engine_id, hello.host, hello.port))
            case Find():
                self._tell(Asked(who, number, question))

    def _welcome(self) -> Welcome:
        return Welcome(
            engine_id=self.hello.engine_id,
            layout=self.hello.layout,
            metadata=self._transport.metadata(),
        )

    def _granted(self, id_: str) -> Granted | Gone:
        lease = self._leases.find(id_)
        if lease is None:
            return Gone()
        loan = lease.loan
        return Granted(
            lease=id_, position=loan.position, key=lease.key, pages=loan.pages, slot=loan.slot
        )

    def _reply(self, who: bytes, number: bytes, answer: Answer) -> None:
        self._server.send_multipart([who, b"", number, ENCODER.encode(answer)])

    # --- questions to others ----------------------------------------------------------------------

    def _release(self, remote: Remote) -> None:
        self._state.held.pop(remote.lease, None)
        with suppress(TransferError):
            self._peers.at(remote.host, remote.port).ask(Release(remote.lease), lambda _: None)

    def _beat(self) -> None:
        state, now = self._state, self._clock()
        if not state.held or now < state.beat_at:
            return
        state.beat_at = now + self._beat_s
        by_place: dict[tuple[str, int], list[str]] = {}
        for lease, where in state.held.items():
            by_place.setdefault(where, []).append(lease)
        for (host, port), leases in by_place.items():
            with suppress(TransferError):
                self._peers.at(host, port).say(Beat(leases))

    def _find(self, number: int, where: tuple[str, int], find: Find) -> None:
        def found(answer: Answer | str) -> None:
            remote = None
            if isinstance(answer, Granted):
                remote = Remote(
                    engine_id=peer.engine_id,
                    host=where[0],
                    port=where[1],
                    lease=answer.lease,
                    position=answer.position,
                )
            self._tell(RemoteMatch(number, remote))

        try:
            peer = self._peers.at(*where)
        except TransferError:
            self._tell(RemoteMatch(number, None))
        else:
            peer.ask(find, found, is_hint=True)

    def _begin(self, pull: Pull) -> None:
        remote = pull.remote
        self._state.held[remote.lease] = remote.host, remote.port
        self._state.pulls.append(pull)
        pull.asked_at = self._clock()
        try:
            peer = pull.peer = self._peers.at(remote.host, remote.port)
        except TransferError as error:
            self._end(pull, str(error))
        else:
            peer.ask(Claim(remote.lease), lambda answer: self._claimed(pull, answer))

    def _claimed(self, pull: Pull, answer: Answer | str) -> None:
        remote, peer = pull.remote, pull.peer
        assert peer is not None, "somebody has answered"
        if pull.is_over:
            return
        if not isinstance(answer, Granted):
            self._end(pull, answer if isinstance(answer, str) else "the lease is over")
        elif (answer.position, answer.key) != (remote.position, pull.key):
            self._end(pull, "what is lent is of another prompt")
        else:
            pages = answer.pages[pull.first : pull.first + len(pull.pages)]
            slot = answer.slot if pull.slot is not None else None
            try:
                local = pieces_of(self.hello.layout, pull.pages, pull.slot)
                there = pieces_of(peer.layout, pages, slot)
                if len(local) != len(there):
                    raise IndexError("less is lent than that")
                pull.transfer = self._transport.begin(peer.handle, local, there)
                pull.began_at = self._clock()
                pull.deadline = pull.began_at + self._timeout_s
                pull.num_bytes = self._num_bytes(pull)
            except (TransferError, IndexError) as error:
                self._peers.drop(peer, str(error))
                self._end(pull, str(error))

    def _num_bytes(self, pull: Pull) -> int:
        pages, slots = map(sum, self.hello.layout.piece_bytes)
        return pages * len(pull.pages) + (slots if pull.slot is not None else 0)

    def _look_at_pulls(self) -> None:
        for pull in self._state.pulls.copy():
            if pull.transfer is None:
                continue
            try:
                is_done = self._transport.is_done(pull.transfer)
            except TransferError as error:
                pull.transfer = None
                if pull.peer is not None:
                    self._peers.drop(pull.peer, str(error))
                self._end(pull, pull.problem or str(error))
                continue
            if is_done:
                pull.transfer = None
                self._confirm(pull)
            elif self._clock() > pull.deadline:
                self._give_up(pull, f"it took more than {self._timeout_s:g} seconds")

    def _give_up(self, pull: Pull, problem: str) -> None:
        """It ends now, or as soon as nobody writes any more."""
        pull.problem = problem
        if pull.transfer is None or self._transport.give_up(pull.transfer):
            pull.transfer = None
            self._end(pull, problem)
        else:
            pull.deadline = self._clock() + self._timeout_s

    def _give_up_pulls(self, ended: threading.Event) -> None:
        self._state.ended.append(ended)
        for pull in self._state.pulls.copy():
            self._give_up(pull, "a step was interrupted")
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._state.pulls:
            for ended in self._state.ended:
                ended.set()
            self._state.ended.clear()

    def _confirm(self, pull: Pull) -> None:
        """All has come; it counts if it was lent until now."""

        def released(answer: Answer | str) -> None:
            if pull.is_over:
                return
            if isinstance(answer, Released) and answer.was_valid and not pull.problem:
                self._end(pull, "")
            else:
                problem = answer if isinstance(answer, str) else "the lease ended before"
                self._end(pull, pull.problem or problem)

        assert pull.peer is not None, "somebody has been read from"
        pull.peer.ask(Release(pull.remote.lease), released)

    def _end(self, pull: Pull, problem: str) -> None:
        self._state.held.pop(pull.remote.lease, None)
        self._state.pulls.remove(pull)
        pull.is_over = True
        if problem:
            logger.warning(
                "engine %s: %s; the prompt is computed here", pull.remote.engine_id, problem
            )
            if pull.peer is not None and not pull.peer.is_over:
                pull.peer.ask(Release(pull.remote.lease), lambda _: None)
        num_bytes = 0 if problem else pull.num_bytes
        self._tell(Pulled(pull.number, problem, num_bytes, self._clock() - pull.asked_at))
        self._note_idle()
