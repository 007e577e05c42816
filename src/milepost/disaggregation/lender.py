"""Answers other engines: hellos, and questions about what is lent to them or could be.

Used by one thread. Knows who has said hello, and who may be reading. Questions that only the engine
can answer are passed to it as `Asked`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from milepost.disaggregation.leases import Leases
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
    Reading,
    Release,
    Released,
    Welcome,
    misfit,
)
from milepost.disaggregation.outcomes import Asked, Outcome, Read
from milepost.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_HELLOS = 4096
"""Connections of others that are remembered; one that is not says hello again."""


class Lender:
    """Raises ConfigError where the address cannot be had. `close` it at the end."""

    def __init__(
        self,
        context: zmq.Context[Any],
        hello: Hello,
        metadata: Callable[[], bytes],
        leases: Leases,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        tell: Callable[[Outcome], None],
    ) -> None:
        self._metadata = metadata
        self._leases = leases
        self._timeout_s = timeout_s
        self._clock = clock
        self._tell = tell
        self.socket = context.socket(zmq.ROUTER)
        self.hello = msgspec.structs.replace(hello, port=self._bind(hello))
        self._hellos: dict[bytes, Hello] = {}
        """Who asks here."""
        self._readers: dict[str, float] = {}
        """Leases that somebody may be reading under, and since when."""
        self._claims: list[tuple[float, Callable[[], bool], bytes, bytes, Granted]] = []
        """That wait until what is lent has been computed, and since when."""

    def _bind(self, hello: Hello) -> int:
        try:
            if hello.port:
                self.socket.bind(f"tcp://{hello.host}:{hello.port}")
                return hello.port
            return self.socket.bind_to_random_port(f"tcp://{hello.host}")
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(
                f"kv_transfer_config: cannot use {hello.host}:{hello.port}: {error}"
            ) from error

    def begun_at(self) -> list[float]:
        """Since when others may be reading here, or wait until they may."""
        now = self._clock()
        for lease, since in list(self._readers.items()):
            if now - since > self._timeout_s:  # whoever it was has given up
                del self._readers[lease]
        return [*self._readers.values(), *(since for since, *_ in self._claims)]

    def answer(self) -> None:
        """Take a question."""
        who, *rest = self.socket.recv_multipart()
        try:
            _, number, body = rest
            question = QUESTIONS.decode(body)
        except (ValueError, msgspec.DecodeError) as error:
            logger.warning("a question that is none of ours: %s", error)
            return
        match question:
            case Hello():
                self.reply(who, number, self._greeted(who, question))
            case _ if who not in self._hellos:
                self.reply(who, number, Declined("say hello first"))
            case Claim(lease=id_):
                self._claim(who, number, id_)
            case Beat(leases=ids):
                self._leases.prolong(ids)
            case Reading(lease=id_):
                self._readers[id_] = self._clock()
            case Release(lease=id_):
                self._release(who, number, id_)
            case Find(tokens=packed) if len(packed) % 4:
                self.reply(who, number, Declined(f"{len(packed)} bytes are no token ids"))
            case Find():
                self._tell(Asked(who, number, question))

    def reply(self, who: bytes, number: bytes, answer: Answer) -> None:
        self.socket.send_multipart([who, b"", number, ENCODER.encode(answer)])

    def _greeted(self, who: bytes, question: Hello) -> Welcome | Declined:
        problem = misfit(question, self.hello)
        if problem:
            logger.warning("engine %s is refused: %s", question.engine_id, problem)
            return Declined(problem)
        if len(self._hellos) >= MAX_HELLOS:
            del self._hellos[next(iter(self._hellos))]
        self._hellos[who] = question
        return Welcome(
            engine_id=self.hello.engine_id, layout=self.hello.layout, metadata=self._metadata()
        )

    def _claim(self, who: bytes, number: bytes, id_: str) -> None:
        lease = self._leases.find(id_)
        if lease is None:
            self.reply(who, number, Gone())
            return
        loan = lease.loan
        granted = Granted(
            lease=id_, position=loan.position, key=lease.key, pages=loan.pages, slot=loan.slot
        )
        self._claims.append((self._clock(), lease.is_ready, who, number, granted))
        self.grant_ready()

    def grant_ready(self) -> None:
        """Answer claims of what the devices have come to the end of by now, and let go of those
        whose answer nobody waits for any more."""
        now = self._clock()
        for claim in self._claims.copy():
            since, is_ready, who, number, granted = claim
            is_late = now - since > self._timeout_s
            if not is_late and not is_ready():
                continue
            self._claims.remove(claim)
            if not is_late:
                self.reply(who, number, granted)

    def _release(self, who: bytes, number: bytes, id_: str) -> None:
        """The answer goes out first: a request waits for it."""
        self._readers.pop(id_, None)
        lease, hello = self._leases.release(id_), self._hellos[who]
        self.reply(who, number, Released(lease is not None))
        if lease is not None:
            self._tell(Read(lease.page, hello.host, hello.port))

    def close(self) -> None:
        self.socket.close(linger=0)
