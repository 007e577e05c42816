"""Messages that are almost right, and an engine that answers with them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import zmq

from milepost.disaggregation.messages import ENCODER, QUESTIONS, Gone, Granted, Released, Welcome
from milepost.disaggregation.sockets import Sockets
from milepost.engine.loop.core import Engine
from tests.disaggregation.fleet import connector_of

NESTED: Any = []
for _ in range(60):
    NESTED = [NESTED]
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**33, 2**40, 2**63 - 1, 2**64 - 1),
    *(1.5, float("nan"), float("inf"), "", "\0", "ü", "x" * 10_000, b"", b"\xff" * 99),
    *([], {}, [[]], [0] * 10_000, NESTED, {"a": NESTED}),
]
DEEP = b"\x82\xa1a" + b"\x91" * 100_000
BROKEN_TEXT = [
    b"\x82\xa4type\xa7Refused\xa3why\xa4\xff\xfe\xfd\xfc",
    b"\x82\xa4type\xa5Claim\xa5lease\xa4\xff\xfe\xfd\xfc",
]


def changed(random: Random, value: Any) -> Any:
    """The same with one part replaced, left out or doubled."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return random.choice(VALUES)
    copy = value.copy()
    key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
    draw = random.random()
    if draw < 0.1:
        del copy[key]
    elif draw < 0.2 and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif draw < 0.2:
        copy[f"{key}{key}"] = copy[key]
    else:
        copy[key] = changed(random, copy[key])
    return copy


def mutated(random: Random, message: msgspec.Struct) -> bytes:
    """An encoded message that is not quite it."""
    draw = random.random()
    if draw < 0.6:
        with contextlib.suppress(OverflowError):  # an integer that msgpack has not
            return msgspec.msgpack.encode(
                changed(random, msgspec.to_builtins(message, str_keys=True))
            )
    body = bytearray(ENCODER.encode(message))
    if draw < 0.7:
        return bytes(body[: random.randrange(len(body))])
    if draw < 0.75:
        return random.choice([DEEP, *BROKEN_TEXT, b"", b"\xdd\xff\xff\xff\xff"])
    for _ in range(random.randrange(1, 4)):
        body[random.randrange(len(body))] = random.randrange(256)
    return bytes(body)


class Liar:
    """Answers an engine that asks: as `of` would, or by messages that are almost right. Then what
    it sends of its memory is never all that was asked for."""

    def __init__(
        self,
        of: Engine,
        random: Random,
        *,
        is_honest: bool = True,
        lie: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """`lie` is what it makes of each answer, a message or bytes, and else it may be honest."""
        self._of, self._random, self._is_honest, self._lie = of, random, is_honest, lie
        self._lies_at = random.choice(["Hello", "Claim", "Release", "read", "read", "read"])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._data = socket.create_server(("127.0.0.1", 0))
        self._data.settimeout(0.02)
        self._is_open = True
        self._threads = [threading.Thread(target=each) for each in (self._answer, self._send)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_open = False
        for thread in self._threads:
            thread.join()
        self._socket.close(linger=0)
        self._context.term()
        self._data.close()

    # --- what it says -----------------------------------------------------------------------------

    def _answer(self) -> None:
        while self._is_open:
            if self._socket.poll(20):
                who, _, number, body = self._socket.recv_multipart()
                with contextlib.suppress(msgspec.DecodeError):
                    self._say(who, number, QUESTIONS.decode(body))

    def _say(self, who: bytes, number: bytes, question: Any) -> None:
        kind, answer = type(question).__name__, self._right(question)
        if answer is None:
            return
        said = self._lie(answer)
        body = said if isinstance(said, bytes) else ENCODER.encode(said)
        if not self._is_honest and kind == self._lies_at:
            body = mutated(self._random, answer)
        frames = [who, b"", number, body]
        if not self._is_honest and self._random.random() < 0.05:
            frames = frames[: self._random.randrange(1, 4)] + [b"x"] * self._random.randrange(4)
        self._socket.send_multipart(frames)

    def _right(self, question: Any) -> Any:
        connector = connector_of(self._of)
        match type(question).__name__:
            case "Hello":
                metadata = msgspec.msgpack.encode(self._data.getsockname()[:2])
                hello = connector.links.hello
                return Welcome(engine_id="liar", layout=hello.layout, metadata=metadata)
            case "Claim":
                lease = connector.leases.find(question.lease)
                if lease is None:
                    return Gone()
                loan = lease.loan
                return Granted(
                    lease=question.lease,
                    position=loan.position,
                    key=lease.key,
                    pages=loan.pages,
                    slot=loan.slot,
                )
            case "Release":
                return Released(True)
        return None

    # --- what it sends of its memory --------------------------------------------------------------

    def _send(self) -> None:
        while self._is_open:
            with contextlib.suppress(TimeoutError):
                sock, _ = self._data.accept()
                sock.settimeout(0.2)
                with sock, contextlib.suppress(OSError, struct.error):
                    self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        _, num = struct.unpack("<16sI", sock.recv(20, socket.MSG_WAITALL))
        numbers = struct.unpack(f"<{num}I", sock.recv(4 * num, socket.MSG_WAITALL))
        transport = connector_of(self._of).transport
        assert isinstance(transport, Sockets)
        view: Callable[[int], memoryview] = transport._pieces.view
        if self._is_honest:
            for number in numbers:
                sock.sendall(view(number))
            return
        with contextlib.suppress(IndexError):
            sent = b"".join(map(view, numbers))
            short = sent[: self._random.randrange(len(sent))]
            sock.sendall(self._random.choice([b"", short, sent[:-1], sent + b"x"]))
            if self._random.random() < 0.2:
                sock.recv(1)  # until it is given up
