"""The thread that talks to other engines: it answers them, asks them, and reads pieces of their
memory.

The engine's thread gives it commands and takes the outcomes after the bell has rung; steps never
wait for it. Nothing that another engine sends ends the thread: `lender` and `peers` drop the
sender.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from milepost.disaggregation.leases import HeldLeases, Leases
from milepost.disaggregation.lender import Lender
from milepost.disaggregation.messages import (
    Asked,
    Find,
    Gone,
    Granted,
    Hello,
    Outcome,
    PeerAnswer,
    RemoteMatch,
)
from milepost.disaggregation.peers import Peers
from milepost.disaggregation.pulls import Pull, Pulls
from milepost.disaggregation.transport import TransferError, Transport, look_s
from milepost.errors import ConfigError
from milepost.kv_config import PeerNetworks
from milepost.kv_transfer_params import Remote
from milepost.zeromq import bell_pair

ALIVE_S = 1.0
"""Seconds after which a caller that waits for the thread checks whether it is alive."""


class Links:
    """Runs the thread. Raises ConfigError if the address cannot be used. `close` it at the end."""

    def __init__(
        self,
        hello: Hello,
        transport: Transport,
        leases: Leases,
        *,
        peers: PeerNetworks,
        timeout_s: float,
        lease_s: float,
        clock: Callable[[], float],
        ring: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._clock = clock
        self._ring = ring
        self._commands: deque[Callable[[], None]] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._context: zmq.Context[Any] = zmq.Context()
        timed: dict[str, Any] = {"timeout_s": timeout_s, "clock": clock, "tell": self._tell}
        try:
            self._lender = Lender(
                self._context,
                hello,
                lambda: transport.metadata(),
                leases,
                peers=peers,
                **timed,
            )
        except ConfigError:
            self._context.term()
            raise
        self.hello = self._lender.hello
        self._peers = Peers(self._context, self.hello, transport, peers, timeout_s, clock)
        self._held_leases = HeldLeases(self._peers, lease_s, clock)
        self._pulls = Pulls(self.hello, transport, self._peers, self._held_leases, **timed)
        self._bell, self._ear = bell_pair(self._context)
        self._rung_for: float | None = None
        """The end of a lease, once the engine has been told of it."""
        self._is_read = False
        """Whether other engines may be reading here."""
        self._is_open = True
        self._death: Exception | None = None
        """The exception that ended the thread."""
        self._thread = threading.Thread(target=self._run, name="kv links", daemon=True)
        self._thread.start()

    # --- of the engine's thread -------------------------------------------------------------------

    def hold(self, remote: Remote) -> None:
        """Asks the other engine what a lease covers, and sends heartbeats to keep it."""
        self._command(lambda: self._pulls.hold(remote))

    def release(self, remote: Remote) -> None:
        """Releases a lease that is not wanted any more."""
        self._command(lambda: self._pulls.release(remote))

    def pull(self, pull: Pull) -> None:
        """Begins a pull, which ends with a `Pulled`."""
        self._command(lambda: self._pulls.begin(pull))

    def end_pulls(self) -> None:
        """Gives up all reads. Returns once nothing writes any more."""
        ended = threading.Event()
        self._command(lambda: self._pulls.give_up(ended))
        while not ended.wait(ALIVE_S):
            self._check_alive()

    def find(self, number: int, where: tuple[str, int], find: Find) -> None:
        """Asks another engine, which ends with a `RemoteMatch`."""
        self._command(lambda: self._find(number, where, find))

    def tell(self, asked: Asked, answer: Granted | Gone) -> None:
        """Answers another engine."""
        self._command(lambda: self._lender.found(asked, answer))

    def take(self) -> list[Outcome]:
        """Returns the outcomes since the last call."""
        self._check_alive()
        found: list[Outcome] = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        return found

    def close(self) -> None:
        """Ends the thread; reads are given up."""
        self._command(self._stop)
        self._thread.join()
        self._bell.close()
        self._ear.close(linger=0)
        self._lender.close()
        self._peers.close()
        self._context.term()

    def _check_alive(self) -> None:
        """Raises the exception that ended the thread, since no outcome would ever come."""
        if self._death is not None:
            raise RuntimeError("the thread that speaks with other engines ended") from self._death

    def _command(self, do: Callable[[], None]) -> None:
        self._commands.append(do)
        self._bell.send(b"")

    # --- of its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport.enter()
            while self._is_open:
                self._poll()
                self._serve()
                self._pulls.look()
                self._peers.give_up_late()
                self._held_leases.beat()
                self._note_ends()
        except Exception as error:  # noqa: BLE001 - raised again in the engine's thread
            self._death = error
            self._ring()

    def _poll(self) -> None:
        """Handles messages and commands, or waits for some."""
        poller = zmq.Poller()
        zap = self._lender.zap.socket
        for socket in (self._ear, zap, self._lender.socket, *self._peers.sockets):
            poller.register(socket, zmq.POLLIN)
        look_s = self._look_s()
        if look_s is not None:
            time.sleep(look_s)
        for socket, _ in poller.poll(self._wait_ms() if look_s is None else 0):
            if socket is self._ear:
                self._run_commands()
            elif socket is zap:
                self._lender.zap.answer()
            elif socket is self._lender.socket:
                self._lender.answer()
            else:
                self._peers.read(socket)

    def _serve(self) -> None:
        """Lets other engines read what is lent to them."""
        was_read, self._is_read = self._is_read, bool(self._lender.begun_at())
        self._lender.grant_ready()
        if self._is_read:
            self._transport.make_progress()
        elif was_read:
            self._transport.stop_progress()

    def _note_ends(self) -> None:
        """Wakes the engine, once, when a lease is over."""
        next_end = self._leases.next_end
        if next_end is not None and next_end <= self._clock() and next_end != self._rung_for:
            self._rung_for = next_end
            self._ring()

    def _look_s(self) -> float | None:
        """Returns the time until reads, here or from here, are polled next; None if none."""
        begun_at = (*self._pulls.begun_at(), *self._lender.begun_at())
        return look_s(self._clock(), begun_at)

    def _wait_ms(self) -> int | None:
        next_end = self._leases.next_end
        waits = [
            self._peers.next_deadline,
            next_end if next_end != self._rung_for else None,
            self._held_leases.next_beat,
        ]
        known = [at for at in waits if at is not None]
        return int(max(min(known) - self._clock(), 0.0) * 1000) + 1 if known else None

    def _run_commands(self) -> None:
        self._ear.recv()
        while self._commands:
            self._commands.popleft()()

    def _stop(self) -> None:
        self._is_open = False
        self._pulls.stop()

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._ring()

    def _find(self, number: int, where: tuple[str, int], find: Find) -> None:
        def found(answer: PeerAnswer | str) -> None:
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
