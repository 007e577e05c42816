"""Answers other engines: hellos, and questions about what is or could be lent to them.

Used by one thread. It knows who has said hello and who may be reading. Questions that only the
engine can answer are passed on as `Asked`. Whatever one engine sends, the others are served: if
handling its message fails, it has to say hello again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from milepost.disaggregation.leases import Leases, granted
from milepost.disaggregation.messages import (
    ENCODER,
    MAX_QUESTION_BYTES,
    QUESTIONS,
    Asked,
    BadMessageError,
    Beat,
    Claim,
    Declined,
    Find,
    Gone,
    Granted,
    Hello,
    Outcome,
    PeerAnswer,
    Read,
    Reading,
    Release,
    Released,
    Welcome,
    decoded,
    endpoint,
    misfit,
)
from milepost.disaggregation.zap import ThrottledWarnings, ZapHandler
from milepost.errors import ConfigError
from milepost.kv_config import PeerNetworks
from milepost.zeromq import between_engines, received_from

logger = logging.getLogger(__name__)

MAX_HELLOS = 4096
"""Largest number of connections that are remembered; the others have to say hello again."""
MAX_CLAIMS = 4096
"""Largest number of claims that wait for a device: more than the number of waiting requests."""
MAX_FINDS = 64
"""Largest number of questions waiting for the engine, which looks at them between steps."""


class Lender:
    """Answers other engines. Raises ConfigError if the address cannot be used. `close` it at the
    end.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        hello: Hello,
        metadata: Callable[[], bytes],
        leases: Leases,
        *,
        peers: PeerNetworks,
        timeout_s: float,
        clock: Callable[[], float],
        tell: Callable[[Outcome], None],
    ) -> None:
        self._metadata = metadata
        self._leases = leases
        self._peers = peers
        self._timeout_s = timeout_s
        self._clock = clock
        self._tell = tell
        self._warnings = ThrottledWarnings(clock)
        self.zap = ZapHandler(context, peers, self._warnings)
        self.socket = between_engines(context.socket(zmq.ROUTER), MAX_QUESTION_BYTES)
        self.zap.guard(self.socket)
        self.hello = msgspec.structs.replace(hello, port=self._bind(hello))
        self._hellos: dict[bytes, tuple[str, int]] = {}
        """Maps the connection of an engine to the address where it can be asked in turn."""
        self._num_finds = 0
        """Number of questions that the engine has not answered."""
        self._readers: dict[str, float] = {}
        """Maps a lease that somebody may be reading under to the time since when."""
        self._claims: list[tuple[float, Callable[[], bool], bytes, bytes, Granted]] = []
        """Claims, with their times, that wait until the lent state is computed."""

    def _bind(self, hello: Hello) -> int:
        try:
            if hello.port:
                self.socket.bind(endpoint(hello.host, hello.port))
                return hello.port
            port: int = self.socket.bind_to_random_port(endpoint(hello.host))
            return port
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"kv_transfer_config: cannot use {hello.host}:{hello.port}: {error}"
            ) from error

    def begun_at(self) -> list[float]:
        """Returns when each read here, or wait to read, by another engine began."""
        now = self._clock()
        for lease, since in list(self._readers.items()):
            if now - since > self._timeout_s:  # the reader has given up
                del self._readers[lease]
        return [*self._readers.values(), *(since for since, *_ in self._claims)]

    def answer(self) -> None:
        """Receives a question and answers it."""
        host, (who, *rest) = received_from(self.socket)
        try:
            self._answer(host, who, rest)
        except BadMessageError as error:
            self._hellos.pop(who, None)
            self._warnings.warn("a question that is none of ours", f"{host}: {error}")
        except Exception:  # whatever it was, other engines are served
            self._hellos.pop(who, None)
            logger.exception("a question of another engine, %s, could not be answered", host)

    def _answer(self, host: str, who: bytes, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise BadMessageError(f"{len(frames)} frames")
        _, number, body = frames
        question = decoded(QUESTIONS, body)
        match question:
            case Hello():
                self.reply(who, number, self._greeted(host, who, question))
            case _ if who not in self._hellos:
                self.reply(who, number, Declined("say hello first"))
            case Claim(lease=id_):
                self._claim(who, number, id_)
            case Beat(leases=ids):
                self._leases.prolong(ids)
            case Reading(lease=id_):
                if self._leases.find(id_) is not None:
                    self._readers[id_] = self._clock()
            case Release(lease=id_):
                self._release(who, number, id_)
            case Find():
                self._find(who, number, question)

    def _find(self, who: bytes, number: bytes, find: Find) -> None:
        if not find.is_sound:
            self.reply(who, number, Declined(f"{len(find.tokens)} bytes are no token ids"))
        elif self._num_finds >= MAX_FINDS:
            self.reply(who, number, Gone())
        else:
            self._num_finds += 1
            self._tell(Asked(who, number, find))

    def found(self, asked: Asked, answer: Granted | Gone) -> None:
        """Sends the engine's answer to a question about tokens."""
        self._num_finds -= 1
        self.reply(asked.who, asked.number, answer)

    def reply(self, who: bytes, number: bytes, answer: PeerAnswer) -> None:
        self.socket.send_multipart([who, b"", number, ENCODER.encode(answer)])

    def _greeted(self, host: str, who: bytes, question: Hello) -> Welcome | Declined:
        if who in self._hellos:
            return Declined("it has said hello")
        problem = misfit(question, self.hello)
        if problem:
            self._warnings.warn("an engine is refused", f"{host}: {problem}")
            return Declined(problem)
        if len(self._hellos) >= MAX_HELLOS:
            del self._hellos[next(iter(self._hellos))]
        self._hellos[who] = question.host, question.port
        return Welcome(
            engine_id=self.hello.engine_id, layout=self.hello.layout, metadata=self._metadata()
        )

    def _claim(self, who: bytes, number: bytes, id_: str) -> None:
        lease = self._leases.find(id_)
        if lease is None:
            self.reply(who, number, Gone())
            return
        if len(self._claims) >= MAX_CLAIMS:
            self.reply(who, number, Declined(f"{MAX_CLAIMS} claims wait"))
            return
        answer = granted(id_, lease.key, lease.loan)
        self._claims.append((self._clock(), lease.is_ready, who, number, answer))
        self.grant_ready()

    def grant_ready(self) -> None:
        """Answers claims whose lent states are computed by now, and drops claims that timed out."""
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
        """Releases a lease. The answer goes out first, since a request waits for it."""
        self._readers.pop(id_, None)
        lease, (host, port) = self._leases.release(id_), self._hellos[who]
        self.reply(who, number, Released(lease is not None))
        if lease is not None and host in self._peers and port:
            self._tell(Read(lease.page, host, port))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.zap.close()
