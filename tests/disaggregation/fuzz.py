"""Attacks both ports of an engine, and names engines to another that lie to it.

    python -m tests.disaggregation.fuzz [--rounds 1000] [--seed 0]

Whatever is sent: the threads live, nothing is logged with a traceback, every request ends, every
answer is a plain loop's, and afterwards the two exchange as before. `make test` runs a few rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import zmq

from milepost.disaggregation import sockets
from milepost.disaggregation.messages import (
    ENCODER,
    Beat,
    Claim,
    Find,
    Reading,
    Release,
    Welcome,
)
from milepost.engine.loop.group import RequestGroup
from milepost.errors import InvalidRequestError
from milepost.kv_transfer_params import read
from tests.disaggregation.fleet import Fleet, connector_of, open_engine, running
from tests.disaggregation.hostile import VALUES, Liar, mutated
from tests.disaggregation.storm import left
from tests.engines import Tiny, greedy, tokens

NUM_PROMPTS = 4
OPTIONS = {"extra": {"timeout_s": 0.4, "max_transfers": 16}, "max_num_seqs": 8}


class Fuzz:
    """Of two engines over sockets: the first is attacked, the second is lied to."""

    def __init__(self, tiny: Tiny, fleet: Fleet, seed: int) -> None:
        self.tiny, self.fleet, self.random = tiny, fleet, Random(seed)
        self.first, self.second = fleet.engines
        self.prompts = [tokens(70 + 20 * number, number) for number in range(NUM_PROMPTS)]
        self.counts: Counter[str] = Counter()
        self._context = zmq.Context()

    def round(self) -> None:
        """Attacks, lies and mistaken parameters at once; then all is as before."""
        lent = [self.fleet.prefill(self.first, prompt) for prompt in self.prompts]
        leases = [params["remote_request_id"] for params in lent if params]
        with contextlib.ExitStack() as stack:
            stack.callback(self._attack_control(leases))
            stack.callback(self._attack_data(leases))
            jobs = []
            for prompt, params in zip(self.prompts, lent, strict=True):
                is_honest = self.random.random() < 0.2
                liar = Liar(self.first, Random(self.random.random()), is_honest=is_honest)
                stack.callback(liar.close)
                jobs.append(
                    self.fleet.add(self.second, prompt, params | {"remote_port": liar.port})
                )
                self._mistake(prompt, params, jobs)
            before = connector_of(self.second).num_fetched
            self.fleet.run(*jobs)
            self.counts["fetched from liars"] += connector_of(self.second).num_fetched - before
        for job in jobs:
            self._judge(job)
        self._judge_both()

    def _mistake(self, prompt: list[int], params: dict[str, Any], jobs: list[RequestGroup]) -> None:
        """Parameters that are almost right; none of them leads to anybody but the first."""
        given = {**params, self.random.choice(list(params)): self.random.choice(VALUES)}
        try:
            wish = read(given)
            if wish is None or wish.remote is None or wish.remote.host in ("127.0.0.1", "h"):
                jobs.append(self.fleet.add(self.second, prompt, given))
            self.counts["parameters taken"] += 1
        except InvalidRequestError:
            self.counts["parameters refused"] += 1

    def _judge(self, job: RequestGroup) -> None:
        (answer,) = job.completions
        output = answer.request.output_token_ids
        if job.prefills:
            return
        assert output == self.tiny.expected(list(job.prompt.token_ids), greedy(4)), output
        self.counts["answers"] += 1

    def _judge_both(self) -> None:
        """Both live, hold nothing, and exchange."""
        for engine in self.fleet.engines:
            links = connector_of(engine).links
            assert links._thread.is_alive()
            connector_of(engine).leases.end()  # those that nobody knows of any more
            engine.poll()
            links.end_pulls()
            self.fleet.until(lambda e=engine: not e.has_work)
        self.fleet.check()
        assert not any(map(left, self.fleet.engines))
        self._is_welcome()
        assert any(self._is_fetched() for _ in range(20)), "they exchange nothing any more"
        self.fleet.check()
        assert self.second.reset_prefix_cache()

    def _is_fetched(self) -> bool:
        """Whether the second reads from the first, for which there is little time."""
        self.second.reset_prefix_cache()
        before, prompt = connector_of(self.second).num_fetched, self.prompts[-1]
        job = self.fleet.decode(self.second, prompt, self.fleet.prefill(self.first, prompt))
        self._judge(job)
        connector_of(self.first).leases.end()
        return connector_of(self.second).num_fetched > before

    # --- the control port -------------------------------------------------------------------------

    def _attack_control(self, leases: list[str]) -> Any:
        """Returns what ends the attack."""
        with self._connected() as sock:
            for _ in range(self.random.randrange(20)):
                sock.send_multipart(self._frames(leases))
            if self.random.random() < 0.1:
                sock.send(bytes(2**25))  # more than a message may have: the connection is closed
        raw = socket.create_connection(connector_of(self.first).place)
        raw.sendall(self.random.randbytes(self.random.randrange(1000)))
        return raw.close

    def _frames(self, leases: list[str]) -> list[bytes]:
        random, hello = self.random, connector_of(self.first).links.hello
        find = Find(tokens=bytes(4 * random.randrange(200)), salt="", least=0)
        some = random.sample(leases, random.randrange(len(leases)))
        lease = random.choice([*leases, "f" * 32])
        questions = [Claim(lease), Beat(some), Reading(lease), find, hello]
        if random.random() < 0.1:
            questions.append(Release(lease))
        question = random.choice(questions)
        draw = random.random()
        body = mutated(random, question) if draw < 0.6 else ENCODER.encode(question)
        if draw < 0.1:
            return [random.randbytes(9) for _ in range(random.randrange(1, 9))]
        return [b"", random.randbytes(8), body]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """To the first engine, after a hello perhaps; what is answered is left unread."""
        sock = self._context.socket(zmq.DEALER)
        sock.connect("tcp://{}:{}".format(*connector_of(self.first).place))
        if self.random.random() < 0.7:
            sock.send_multipart([b"", b"0", ENCODER.encode(connector_of(self.first).links.hello)])
        yield sock
        sock.close(linger=200)

    def _is_welcome(self) -> None:
        """Who is polite is served."""
        sock = self._context.socket(zmq.DEALER)
        sock.connect("tcp://{}:{}".format(*connector_of(self.first).place))
        sock.send_multipart([b"", b"0", ENCODER.encode(connector_of(self.first).links.hello)])
        assert sock.poll(10_000), "the control port does not answer"
        msgspec.msgpack.decode(sock.recv_multipart()[2], type=Welcome)
        sock.close(linger=0)

    # --- the data port ----------------------------------------------------------------------------

    def _attack_data(self, leases: list[str]) -> Any:
        """Returns what ends the attack."""
        random, stack = self.random, contextlib.ExitStack()
        transport = connector_of(self.first).transport
        lease, num_pieces = bytes.fromhex(random.choice(leases)), transport._pieces._num
        for _ in range(random.randrange(6)):
            numbers = [random.randrange(num_pieces + 3) for _ in range(random.randrange(4))]
            num = random.choice([len(numbers), len(numbers) + 1, 2**32 - 1, 0])
            head = struct.pack("<16sI", random.choice([lease, bytes(16)]), num)
            whole = head + struct.pack(f"<{len(numbers)}I", *numbers)
            cut = whole[: random.randrange(len(whole) + 1)]
            sock = stack.enter_context(socket.create_connection(transport._listening.getsockname()))
            with contextlib.suppress(OSError):
                sock.sendall(random.choice([whole, whole, cut, b"", random.randbytes(50)]))
            if random.random() < 0.3:
                sock.close()
        return stack.close

    def close(self) -> None:
        self._context.term()


class Tracebacks(logging.Handler):
    """Fails for what is logged with one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def run(tiny: Tiny, rounds: int, seed: int) -> Counter[str]:
    handler, threads = Tracebacks(), threading.active_count()
    logging.getLogger("milepost").addHandler(handler)
    head_s, sockets.HEAD_S = sockets.HEAD_S, 0.3
    try:
        with running(*(open_engine(tiny.folder, "socket", **OPTIONS) for _ in range(2))) as fleet:
            fuzz = Fuzz(tiny, fleet, seed)
            for number in range(rounds):
                fuzz.round()
                assert not handler.found, (number, handler.found)
                assert threading.active_count() < threads + 40, "threads are left behind"
            fuzz.close()
    finally:
        sockets.HEAD_S = head_s
        logging.getLogger("milepost").removeHandler(handler)
    return fuzz.counts


def main() -> int:
    from tests.disaggregation.conftest import save_small

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(dict(run(save_small(Path(folder)), arguments.rounds, arguments.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
