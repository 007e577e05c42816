"""Reads of this engine from others, from the claim to the confirmation.

The steps of a pull: claim the lease (as soon as a request arrives with it, while the request is
matched and planned) and compare what it covers with what is wanted; read, once nothing that runs
here can conflict; ask whether the lease was valid throughout. Any failure ends the pull with one
reason, and only once nothing writes here any more. Used by one thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from milepost.disaggregation.leases import HeldLeases
from milepost.disaggregation.messages import (
    Claim,
    Granted,
    Hello,
    PeerAnswer,
    Pulled,
    Reading,
    Release,
    Released,
)
from milepost.disaggregation.peers import Peer, Peers
from milepost.disaggregation.registered_pools import pieces_of
from milepost.disaggregation.transport import TransferError, Transport
from milepost.errors import MilepostError
from milepost.kv_transfer_params import Remote
from milepost.logs import shown

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """A fetch of the parts that a request lacks: the lent pages from number `first` on into
    `pages`, and the state into `slot` and the pages of `windows`.
    """

    number: int
    remote: Remote
    key: bytes
    """Key of the wanted state."""
    first: int
    pages: tuple[int, ...]
    slot: int | None
    windows: tuple[int, ...]
    is_ready: Callable[[], bool]
    """Whether nothing here uses that memory any more."""
    granted: Granted | None = None
    """Contents of the lease, which are read once `is_ready`."""
    num_bytes: int = 0
    asked_at: float = 0.0
    peer: Peer | None = None
    transfer: Any = None
    began_at: float = 0.0
    read_s: float = 0.0
    """Time from the first to the last byte."""
    deadline: float = 0.0
    problem: str = ""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Claimed:
    """The contents of a lease, and the pulls that wait to learn them."""

    peer: Peer | None = None
    answer: PeerAnswer | str | None = None
    waiting: list[Pull] = field(default_factory=list)


class Pulls:
    """Pulls under way, into memory with the layout in `hello`. Calls `tell` with the end of
    each.
    """

    def __init__(
        self,
        hello: Hello,
        transport: Transport,
        peers: Peers,
        held_leases: HeldLeases,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        tell: Callable[[Pulled], None],
    ) -> None:
        self._layout, self._num_ranks = hello.layout, hello.num_ranks
        self._transport = transport
        self._peers = peers
        self._held_leases = held_leases
        self._timeout_s = timeout_s
        self._clock = clock
        self._tell = tell
        self._claims: dict[Remote, _Claimed] = {}
        self._under_way: list[Pull] = []
        self._ended: list[threading.Event] = []
        """Events to set once nothing is under way."""

    def begun_at(self) -> list[float]:
        """Returns the times since which pulls have been reading, or waiting to read."""
        return [
            pull.began_at
            for pull in self._under_way
            if pull.transfer is not None or pull.granted is not None
        ]

    def hold(self, remote: Remote) -> None:
        """Asks what a lease covers, for a request that may want it."""
        self._held_leases.hold(remote)
        self._claim(remote)

    def release(self, remote: Remote) -> None:
        """Releases a lease that no request needs any more."""
        self._claims.pop(remote, None)
        self._held_leases.release(remote)

    def begin(self, pull: Pull) -> None:
        """Begins a pull, which ends with a `Pulled`."""
        self._held_leases.hold(pull.remote)
        self._under_way.append(pull)
        pull.asked_at = self._clock()
        claim = self._claims.get(pull.remote)
        if claim is None or claim.peer is None or claim.peer.is_over:
            claim = self._claim(pull.remote)
        pull.peer = claim.peer
        if claim.answer is None:
            claim.waiting.append(pull)
        else:
            self._claimed(pull, claim.answer)

    def look(self) -> None:
        """Begins reads that waited for the device, handles finished reads, and gives up
        slow ones.
        """
        for pull in self._under_way.copy():
            if pull.granted is not None:
                self._read_if_ready(pull, pull.granted)
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
                pull.read_s = self._clock() - pull.began_at
                self._confirm(pull)
            elif self._clock() > pull.deadline:
                self._give_up(pull, f"it took more than {self._timeout_s:g} seconds")

    def give_up(self, ended: threading.Event) -> None:
        """Gives up all pulls. `ended` is set once nothing writes any more."""
        self._ended.append(ended)
        for pull in self._under_way.copy():
            self._give_up(pull, "a step was interrupted")
        self._note_idle()

    def stop(self) -> None:
        """Gives up all reads without reporting them."""
        for pull in self._under_way:
            if pull.transfer is not None:
                self._transport.cancel(pull.transfer)

    def _claim(self, remote: Remote) -> _Claimed:
        claim = self._claims[remote] = _Claimed()

        def told(answer: PeerAnswer | str) -> None:
            claim.answer = answer
            waiting, claim.waiting = claim.waiting, []
            for pull in waiting:
                self._claimed(pull, answer)

        try:
            claim.peer = self._peers.at(*remote.place)
        except TransferError as error:
            told(str(error))
        else:
            claim.peer.ask(Claim(remote.lease), told)
        return claim

    def _claimed(self, pull: Pull, answer: PeerAnswer | str) -> None:
        if pull.is_over:
            return
        if not isinstance(answer, Granted):
            self._end(pull, answer if isinstance(answer, str) else "the lease is over")
        elif (answer.position, answer.key) != (pull.remote.position, pull.key):
            self._end(pull, "what is lent is of another prompt")
        else:
            pull.granted, pull.began_at = answer, self._clock()
            self._read_if_ready(pull, answer)

    def _read_if_ready(self, pull: Pull, granted: Granted) -> None:
        if pull.is_ready():
            pull.granted = None
            self._read(pull, granted)

    def _read(self, pull: Pull, granted: Granted) -> None:
        peer = pull.peer
        assert peer is not None, "somebody has answered"
        pages = granted.pages[pull.first : pull.first + len(pull.pages)]
        state = (None, ()) if pull.slot is None else (granted.slot, granted.windows)
        try:
            if peer.is_over:
                raise TransferError("the other engine was let go of")
            local = pieces_of(self._layout, pull.pages, pull.slot, pull.windows)
            there = pieces_of(peer.layout, pages, *state)
            if len(local) != len(there):
                raise TransferError("less is lent than that")
            pull.began_at = self._clock()
            peer.say(Reading(pull.remote.lease))
            pull.transfer = self._transport.begin(peer.handle, pull.remote.lease, local, there)
        except MilepostError:
            raise  # a rank is lost, and may still write
        except Exception as error:
            if not isinstance(error, TransferError | IndexError):
                logger.exception("what another engine lends could not be read")
            self._peers.drop(peer, str(error))
            self._end(pull, str(error))
        else:
            pull.deadline = pull.began_at + self._timeout_s
            pull.num_bytes = self._num_bytes(pull)

    def _num_bytes(self, pull: Pull) -> int:
        nums = len(pull.pages), int(pull.slot is not None), len(pull.windows)
        each = map(sum, self._layout.piece_bytes)
        return self._num_ranks * sum(size * num for size, num in zip(each, nums, strict=True))

    def _confirm(self, pull: Pull) -> None:
        """Confirms a finished read: it counts if the lease was valid until now."""

        def released(answer: PeerAnswer | str) -> None:
            if pull.is_over:
                return
            if isinstance(answer, Released) and answer.was_valid and not pull.problem:
                self._end(pull, "")
            else:
                problem = answer if isinstance(answer, str) else "the lease ended before"
                self._end(pull, pull.problem or problem)

        assert pull.peer is not None, "somebody has been read from"
        pull.peer.ask(Release(pull.remote.lease), released)

    def _give_up(self, pull: Pull, problem: str) -> None:
        """Ends a pull now, or as soon as nothing writes any more."""
        pull.problem = problem
        if pull.transfer is None or self._transport.cancel(pull.transfer):
            pull.transfer = pull.granted = None
            self._end(pull, problem)
        else:
            pull.deadline = self._clock() + self._timeout_s

    def _end(self, pull: Pull, problem: str) -> None:
        if pull.is_over:
            return
        self._held_leases.let_go(pull.remote)
        self._claims.pop(pull.remote, None)
        self._under_way.remove(pull)
        pull.is_over = True
        if problem:
            logger.warning(
                "engine %s at %s: %s; the prompt is computed here",
                pull.remote.engine_id,
                "{}:{}".format(*pull.remote.place),
                shown(problem),
            )
            if pull.peer is not None and not pull.peer.is_over:
                pull.peer.ask(Release(pull.remote.lease), lambda _: None)
        num_bytes = 0 if problem else pull.num_bytes
        seconds = self._clock() - pull.asked_at
        self._tell(Pulled(pull.number, problem, num_bytes, seconds, pull.read_s))
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._under_way:
            for ended in self._ended:
                ended.set()
            self._ended.clear()
