"""A rank other than the first, in a process of its own. It runs what rank 0 runs, plan by plan.

It has a part of the model, of the pools and of the tiers, and no scheduler: it does only what
arrives over its socket. It ends when the socket closes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import msgspec

from milepost.engine import heap
from milepost.engine.assembly import (
    HERE,
    SILENCE_S,
    START_S,
    AnnexCommand,
    Answered,
    RankConfig,
    RankFailure,
    RankMessage,
    RankParts,
    TicketedCommand,
    build_rank,
    tier_worker_of,
)
from milepost.engine.ending import end_with_parent
from milepost.engine.off_device import RankWorker
from milepost.errors import EngineDeadError, MilepostError
from milepost.frames import framed, read_frames
from milepost.logs import set_up
from milepost.parallel import Ranks
from milepost.parallel.gloo import GlooLink, open_store
from milepost.runner.recording import Record
from milepost.runner.replay import replay
from milepost.runner.runner import Runner
from milepost.tiers.rank_worker import RankTierWorker

logger = logging.getLogger(__name__)

ReportDone = Callable[[int, bool], None]
"""Reports a ticket, and whether its command succeeded."""


def main() -> int:
    """Runs a rank's process. The command line has one argument, the socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and systemd may send it to all processes
    sock = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent(sock.fileno())
    heap.bound_plans()
    report = _Reporter(sock)
    try:
        _run(sock, report)
    except Exception as error:  # noqa: BLE001 - reported, and the end
        _fail(report, error)
    return 0


def _fail(report: _Reporter, error: Exception) -> NoReturn:
    """Reports the reason, and ends the process."""
    kind = type(error) if isinstance(error, MilepostError) else EngineDeadError
    if kind is not type(error):
        logger.error("the rank failed", exc_info=error)
    report(
        RankFailure(kind=kind.__name__, message=str(error) if kind is type(error) else repr(error))
    )
    # At once: what threads and the device are at may never be over.
    logging.shutdown()
    os._exit(1)


class _Reporter:
    """Sends this rank's messages, from any of its threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lock = sock, threading.Lock()

    def __call__(self, message: RankFailure | Answered) -> None:
        with suppress(OSError), self._lock:
            self._socket.sendall(framed(msgspec.msgpack.encode(message)))


def _run(sock: socket.socket, report: _Reporter) -> None:
    frames = read_frames(sock.makefile("rb").read)
    given = msgspec.msgpack.decode(next(frames), type=RankConfig)
    config, rank = given.config, given.rank
    if given.logs is not None:
        set_up(replace(given.logs, process=f"rank {rank}"))
    size = config.tensor_parallel_size
    store = open_store(given.port, size, START_S, is_first=False)
    lost = "another rank does not answer"
    report(Answered(HERE, True))
    link = GlooLink(store, rank, size, timeout_s=SILENCE_S, why_lost=lambda: lost)
    link.wait_up_to(START_S)
    ranks = Ranks(rank=rank, size=size, link=link, splits_experts=config.enable_expert_parallel)
    parts = build_rank(config, ranks)
    heap.settle()
    link.wait_up_to(SILENCE_S)
    answer: ReportDone = lambda ticket, is_well: report(Answered(ticket, is_well))  # noqa: E731
    serve(_messages(frames), parts, answer, partial(_fail, report))


def serve(
    messages: Iterable[RankMessage],
    parts: RankParts,
    answer: ReportDone,
    fail: Callable[[Exception], object],
) -> None:
    """Carries out all that rank 0 asks for. `fail` ends it from another thread."""
    tier_worker = tier_worker_of(parts.runner, parts.tier_state, answer)
    worker = None if parts.access is None else parts.access.worker(parts.runner, answer, fail)
    follow(_records(messages, tier_worker, worker), parts.runner)
    if worker is not None:
        worker.close()


def follow(records: Iterable[Record], runner: Runner) -> None:
    """Runs what rank 0 runs. Raises EngineDeadError if it samples other tokens."""
    for recorded, found in replay(records, runner):
        if found.tokens != recorded.tokens:
            raise EngineDeadError(
                f"sampled {found.tokens} where rank 0 sampled {recorded.tokens}: they no longer "
                "hold the same numbers"
            )


def _records(
    messages: Iterable[RankMessage], tier_worker: RankTierWorker | None, worker: RankWorker | None
) -> Iterator[Record]:
    """Yields the runner's records, and carries out the other commands."""
    for each in messages:
        if not isinstance(each, TicketedCommand):
            yield each
        elif isinstance(each.command, AnnexCommand):
            assert worker is not None, "nothing is asked of who exchanges nothing"
            worker.do(each.ticket, each.command.body)
        else:
            assert tier_worker is not None, "nothing is asked of who keeps nothing"
            tier_worker.do(each.ticket, each.command)


def _messages(frames: Iterator[bytes]) -> Iterator[RankMessage]:
    decoder = msgspec.msgpack.Decoder(RankMessage)
    return map(decoder.decode, frames)


if __name__ == "__main__":
    sys.exit(main())
