"""A team whose other ranks are threads of this process: they start at once."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future

import msgspec

from milepost.config import EngineConfig
from milepost.engine.assembly.rank import build_rank
from milepost.engine.assembly.rank_messages import Tickets
from milepost.engine.assembly.team import RankCommand, RankMessage, TicketedCommand
from milepost.engine.processes.rank import serve
from milepost.errors import EngineDeadError
from milepost.parallel import Ranks
from tests.parallel.threads import Meeting, ThreadLink


class ThreadTeam:
    """As `engine.team.Team`: what is told goes through bytes."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        meeting = Meeting(size)
        all_ranks = [
            Ranks(
                rank=rank,
                size=size,
                link=ThreadLink(meeting, rank),
                splits_experts=config.enable_expert_parallel,
            )
            for rank in range(size)
        ]
        self.ranks, self.meeting = all_ranks[0], meeting
        self._encoder = msgspec.msgpack.Encoder()
        self._orders = [queue.SimpleQueue() for _ in range(1, size)]
        self.tickets = Tickets(size - 1)
        for ranks, orders in zip(all_ranks[1:], self._orders, strict=True):
            arguments = config, ranks, orders, meeting, self.tickets
            threading.Thread(target=_run, args=arguments, daemon=True).start()
        self.close = weakref.finalize(self, _end, self._orders, meeting)

    def ask(self, order: RankCommand) -> Future[bool]:
        ticket, answers = self.tickets.take()
        self.write(TicketedCommand(ticket, order))
        return answers

    def write(self, record: RankMessage) -> None:
        body = self._encoder.encode(record)
        for orders in self._orders:
            orders.put(body)

    wait = alarm = None
    has_lost_one = False

    def failure(self) -> EngineDeadError:
        return EngineDeadError("rank 1 is lost")

    def expect_prompt_answers(self) -> None:
        """Threads are."""

    def reason(self, error: Exception) -> Exception:
        return error


def _run(
    config: EngineConfig,
    ranks: Ranks,
    orders: queue.SimpleQueue[bytes],
    meeting: Meeting,
    tickets: Tickets,
) -> None:
    decoder = msgspec.msgpack.Decoder(RankMessage)
    try:
        told = map(decoder.decode, iter(orders.get, b""))
        serve(told, build_rank(config, ranks), tickets.answer, tickets.fail)
    except threading.BrokenBarrierError:
        pass
    except BaseException:
        meeting.abort()
        raise


def _end(all_orders: list[queue.SimpleQueue[bytes]], meeting: Meeting) -> None:
    meeting.abort()
    for orders in all_orders:
        orders.put(b"")
