"""A rank but the first, in a process of its own: runs what rank 0 runs, plan by plan.

It has a part of the model and of the pools, and no scheduler: all that it does is in the records
that come over its socket. It ends when that closes.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec

from milepost.engine import heap
from milepost.engine.parent import end_with_parent
from milepost.engine.setup import build_rank
from milepost.engine.team import SILENCE_S, START_S, Lost, Orders
from milepost.errors import EngineDeadError, MilepostError
from milepost.parallel import Ranks
from milepost.parallel.gloo import GlooLink, open_store
from milepost.parallel.records import received, send
from milepost.runner.recording import Record
from milepost.runner.replay import replay
from milepost.runner.runner import Runner

logger = logging.getLogger(__name__)


def main() -> int:
    """The process; its one argument is the socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent(sock.fileno())
    heap.bound_plans()
    try:
        _run(sock)
    except MilepostError as error:
        _say(sock, type(error).__name__, str(error))
        return 1
    except Exception as error:
        logger.exception("the rank failed")
        _say(sock, EngineDeadError.__name__, repr(error))
        return 1
    return 0


def _run(sock: socket.socket) -> None:
    frames = received(sock)
    orders = msgspec.msgpack.decode(next(frames), type=Orders)
    config, rank = orders.config, orders.rank
    size = config.tensor_parallel_size
    store = open_store(orders.port, size, START_S, is_first=False)
    lost = "another rank does not answer"
    link = GlooLink(store, rank, size, timeout_s=START_S, why_lost=lambda: lost)
    ranks = Ranks(rank=rank, size=size, link=link, splits_experts=config.enable_expert_parallel)
    runner = build_rank(config, ranks).runner
    heap.settle()
    link.be_prompt(SILENCE_S)
    follow(_records(frames), runner)


def follow(records: Iterable[Record], runner: Runner) -> None:
    """Run what rank 0 runs. Raises EngineDeadError where something else is sampled."""
    for recorded, found in replay(records, runner):
        if found.tokens != recorded.tokens:
            raise EngineDeadError(
                f"sampled {found.tokens} where rank 0 sampled {recorded.tokens}: they no longer "
                "hold the same numbers"
            )


def _records(frames: Iterator[bytes]) -> Iterator[Record]:
    decoder = msgspec.msgpack.Decoder(Record)
    return map(decoder.decode, frames)


def _say(sock: socket.socket, kind: str, message: str) -> None:
    with suppress(OSError):
        send(sock, msgspec.msgpack.encode(Lost(kind=kind, message=message)))


if __name__ == "__main__":
    sys.exit(main())
