"""The first rank's view of the others: starts a process for each, forwards what its own runner is
told, and notices when one is lost.

The engine's process is rank 0. So sampled tokens need no way back, and no step waits for a socket:
plans are sent as the bytes that `--record-plans` would write, before the step is launched here.
Each rank runs all of them, in order, and samples by itself, from the same logits with the same
noise; a rank that samples other tokens than rank 0 reports it and ends.

A rank that ends closes its socket, and whoever waits for it gets an error with the reason. A
process that outlives rank 0 sees its socket close, and ends.
"""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import torch

from milepost import errors
from milepost.config import EngineConfig
from milepost.engine.assembly.rank_messages import (
    HERE,
    SILENCE_S,
    START_S,
    Answered,
    RankCommand,
    RankConfig,
    RankFailure,
    RankMessage,
    TicketedCommand,
    Tickets,
)
from milepost.engine.ending import without_interrupts, without_main
from milepost.errors import EngineDeadError, MilepostError
from milepost.frames import framed, receive
from milepost.logs import current
from milepost.parallel import Ranks
from milepost.parallel.gloo import GlooLink, open_store

logger = logging.getLogger(__name__)

_NOTICE_S = 5.0
"""A process that has closed its connections is over within this time."""


class Team:
    """The ranks of one engine. `close` it, or let go of it."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        store = open_store(0, size, START_S, is_first=True)
        self._others = OtherRanks(
            [
                RankConfig(config=config, rank=rank, port=store.port, logs=current())
                for rank in range(1, size)
            ]
        )
        self.alarm = self._others.alarm
        """Readable once a rank is lost."""
        self.closing = self._others.closing
        """Functions that are called when the team closes."""
        self.ask, self.write = self._others.ask, self._others.write
        self.close = weakref.finalize(self, self._others.end)
        are_here = self._others.start()
        try:
            are_here.result()
            self._link = GlooLink(
                store, 0, size, timeout_s=SILENCE_S, why_lost=self._others.why_lost
            )
        except (EngineDeadError, RuntimeError) as error:
            failure = self.failure()
            self.close()
            raise failure from error
        self._link.wait_up_to(START_S)
        self.ranks = Ranks(
            rank=0, size=size, link=self._link, splits_experts=config.enable_expert_parallel
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [each.process.pid for each in self._others.members if each.process is not None]

    def wait(self, event: torch.cuda.Event) -> None:
        """Waits for an event of the device. Raises EngineDeadError if a rank is lost meanwhile: the
        device would wait for it forever, or has continued without its part."""
        deadline = time.monotonic() + SILENCE_S
        while not event.query() and not self.has_lost_one:
            if time.monotonic() > deadline:
                raise self.failure()
            time.sleep(0)
        if self.has_lost_one:
            raise self.failure()

    def expect_prompt_answers(self) -> None:
        """Records that all ranks are ready. From now on, a rank that stays silent counts
        as lost."""
        self._link.wait_up_to(SILENCE_S)

    def reason(self, error: Exception) -> Exception:
        """Returns why the start failed. If another rank was the first to fail, that is its
        error."""
        causes = self._others.errors()
        self.close()
        return causes[0] if isinstance(error, EngineDeadError) and causes else error

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank has ended."""
        return self._others.lost.is_set()

    def failure(self) -> MilepostError:
        """Returns the error of a rank that does not answer."""
        return self._others.failure()


class OtherRanks:
    """The processes of the other ranks, and a thread that starts them and watches until the first
    of them ends. It does not know the team, so the team can end when nobody refers to it."""

    def __init__(self, configs: Sequence[RankConfig]) -> None:
        self.members = [_Member(config) for config in configs]
        self.lost = threading.Event()
        """Set once a rank is lost."""
        self.alarm, self._bell = socket.socketpair()
        self.closing: list[Callable[[], object]] = [self.alarm.close, self._bell.close]
        self._tickets = Tickets(len(configs))
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        """Held while a frame is sent, so that frames of several threads do not mix."""

    def start(self) -> Future[bool]:
        """Starts all processes. The future ends once all of them are ready to meet."""
        ticket, are_here = self._tickets.take()
        assert ticket == HERE
        started = threading.Event()
        # The thread that starts a process is the one that it ends with: this one stays.
        threading.Thread(target=self._watch, args=(started,), name="ranks", daemon=True).start()
        started.wait()
        return are_here

    def ask(self, command: RankCommand) -> Future[bool]:
        """Sends a command to all of them; may be called from any thread. See
        `tiers.commands.SendTierCommand`."""
        ticket, answers = self._tickets.take()
        self.write(TicketedCommand(ticket, command))
        return answers

    def write(self, record: RankMessage) -> None:
        """Sends a record to all of them. Raises EngineDeadError if one has ended, or receives
        nothing any more."""
        with self._sending:
            frame = framed(self._encoder.encode(record))
            for member in self.members:
                try:
                    member.socket.sendall(frame)
                except OSError as error:
                    raise self.failure() from error

    def failure(self) -> MilepostError:
        """Returns the error of a rank that was killed, or else the reason given by another rank."""
        if not self.lost.wait(_NOTICE_S):
            return EngineDeadError(f"a rank did not answer within {SILENCE_S:g} seconds")
        return next(iter(self.errors()), EngineDeadError("a rank has ended"))

    def why_lost(self) -> str:
        """Returns the words of `failure`."""
        return str(self.failure())

    def errors(self) -> list[MilepostError]:
        """Returns the errors of ranks that have ended; those that ended without giving a reason
        come first."""
        ended = sorted(self.members, key=lambda member: member.last_words is not None)
        return [error for member in ended if (error := member.error()) is not None]

    def end(self) -> None:
        """Ends all processes."""
        for member in self.members:
            member.end()
        for close in self.closing:
            close()

    def _watch(self, started: threading.Event) -> None:
        """Starts all members and takes their answers, until the first of them ends."""
        try:
            with without_interrupts(), without_main():
                for member in self.members:
                    member.start()
        except OSError as error:
            words = f"its process cannot be started: {error.strerror or error}"
            member.last_words = RankFailure(kind=EngineDeadError.__name__, message=words)
            self._note_loss()
            return
        finally:
            started.set()
        poll = select.poll()
        by_descriptor = {member.socket.fileno(): member for member in self.members}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while all(by_descriptor[number].hear(self._tickets) for number, _ in poll.poll()):
            pass
        self._note_loss()
        for member in self.members:
            member.wait()

    def _note_loss(self) -> None:
        """Fails what waits for answers, and rings the alarm."""
        self.lost.set()
        self._tickets.fail(self.failure())
        with suppress(OSError):
            self._bell.send(b".")


class _Member:
    """Another rank's process, and our end of the socket to it."""

    def __init__(self, config: RankConfig) -> None:
        self.rank, self._config = config.rank, config
        self.socket, self._theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | None = None
        self.last_words: RankFailure | None = None

    def start(self) -> None:
        """Raises OSError if the system has no room for another process."""
        descriptor = self._theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "milepost.engine.processes.rank", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the first rank's to handle
        )
        self._theirs.close()
        self.socket.settimeout(SILENCE_S)
        with suppress(OSError):  # one that has ended already is heard of like any other
            self.socket.sendall(framed(msgspec.msgpack.encode(self._config)))

    def hear(self, tickets: Tickets) -> bool:
        """Handles its next message. Returns False if it was the last."""
        body = receive(self.socket)
        if body is None:
            self.wait()
            return False
        said = msgspec.msgpack.decode(body, type=RankFailure | Answered)
        if isinstance(said, RankFailure):
            self.last_words = said
            return False
        tickets.answer(said.ticket, said.is_well)
        return True

    def error(self) -> MilepostError | None:
        """Returns the error that ended it; None while it lives."""
        if self.last_words is not None:
            kind = getattr(errors, self.last_words.kind, EngineDeadError)
            return kind(f"rank {self.rank}: {self.last_words.message}")
        code = None if self.process is None else self.process.poll()
        if code is None:
            return None
        ending = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        return EngineDeadError(f"rank {self.rank} has ended: {ending}")

    def wait(self) -> None:
        """Waits until its process has ended, if it has one."""
        if self.process is not None:
            self.process.wait()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.wait()
        for end in (self.socket, self._theirs):
            end.close()
