"""Engines in processes of their own that exchange KV and states, and random requests to them.

    python -m tests.disaggregation.processes [--engines 4] [--ranks 2] [--transport nixl]
        [--requests 1000]

Each request is prefilled by one and decoded by another, or by one alone; each answer is one
engine's, and no byte moves that was there. `make test-nightly` runs it on two and on four.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import torch

from milepost.engine.prompts import Prompt
from tests.disaggregation.fleet import PREFILL, connector_of, lacking, open_engine, sizes
from tests.engines import VOCAB_SIZE, Tiny, greedy, sampled, tokens
from tests.invariants import check


class Worker:
    """An engine that does what it is sent, one thing after the other, and serves others between."""

    def __init__(self, pipe: Connection, folder: Path, transport: str, options: Any) -> None:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # of other ranks
        self.pipe = pipe
        self.engine = open_engine(folder, transport, **options)

    def run(self) -> None:
        while True:
            wait([self.pipe, self.engine.wakers[0]])
            self.engine.poll()
            if self.pipe.poll():
                name, *given = self.pipe.recv()
                self.pipe.send(getattr(self, name)(*given))
                if name == "close":
                    return

    def prefill(self, asked: list[int], salt: str) -> dict[str, Any] | None:
        return self._ask(asked, salt, PREFILL, greedy(1, min_tokens=1)).kv_transfer_params

    def decode(self, asked: list[int], salt: str, params: Any, sampling: Any) -> dict[str, Any]:
        connector, cache = connector_of(self.engine), self.engine.scheduler.cache
        before, failed = connector.num_bytes, connector.num_failed
        has_pages = len(cache.match(cache.chain(asked, salt)).path.nodes)
        expected = lacking(self.engine, asked, len(asked) - 1, salt) if params else 0
        request = self._ask(asked, salt, params, sampling).completions[0].request
        return {
            "tokens": request.output_token_ids,
            "bytes": connector.num_bytes - before,
            "expected_bytes": expected,
            "failed": connector.num_failed - failed,
            "reused": request.report.reused,
            "has_pages": has_pages,
            "state_bytes": sum(sizes(self.engine)),
        }

    def await_leases(self) -> bool:
        """Until none is left: their end rings the bell."""
        while len(connector_of(self.engine).leases):
            wait([self.engine.wakers[0]], 10.0)
            self.engine.poll()
        return True

    def forget(self) -> bool:
        return self.engine.reset_prefix_cache()

    def kill_at_read(self, pid: int) -> None:
        """Whom is read from next, once all is agreed on."""
        transport = connector_of(self.engine).transport
        begin = transport.begin

        def lose_and_begin(*given: Any) -> Any:
            os.kill(pid, signal.SIGKILL)
            select.select([os.pidfd_open(pid)], [], [])  # until it is dead
            return begin(*given)

        transport.begin = lose_and_begin

    def die_at_read(self) -> None:
        """This one, as soon as it has begun to read."""
        transport = connector_of(self.engine).transport
        begin = transport.begin

        def begin_and_die(*given: Any) -> Any:
            begin(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        transport.begin = begin_and_die

    def check(self) -> tuple[int, int]:
        """Leases that are left, and what they and requests hold; every cache is whole."""
        self.engine.poll()
        cache = self.engine.scheduler.cache
        check(cache)
        return len(connector_of(self.engine).leases), len(cache.loans) + len(cache.allocations)

    def close(self) -> None:
        self.engine.close()

    def _ask(self, asked: list[int], salt: str, params: Any, sampling: Any) -> Any:
        prompt = Prompt(token_ids=asked, cache_salt=salt, kv_transfer_params=params)
        job = self.engine.add(prompt, sampling)
        while not job.is_finished:
            if self.engine.awaits_others:
                wait([self.engine.wakers[0]], 0.05)
            self.engine.step()
        return job


class Process:
    """One of the engines, as who drives it sees it."""

    def __init__(self, folder: Path, transport: str, options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, folder, transport, options))
        self.process.start()
        theirs.close()

    def begin(self, name: str, *given: Any) -> None:
        self.pipe.send((name, *given))

    def do(self, name: str, *given: Any) -> Any:
        self.begin(name, *given)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            self.do("close")
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, folder: Path, transport: str, options: Any) -> None:
    Worker(pipe, folder, transport, options).run()


class Traffic:
    """Random requests that share prefixes; as many at a time as there are pairs of engines."""

    def __init__(self, tiny: Tiny, engines: list[Process], seed: int) -> None:
        self.tiny, self.engines, self.random = tiny, engines, Random(seed)
        self.bases = [tokens(260, base) for base in range(5)]
        self.counts: Counter[str] = Counter()

    def run(self, num: int) -> Counter[str]:
        idle, busy, num_begun = list(self.engines), [], 0
        while num_begun < num or busy:
            while num_begun < num and len(idle) > 1:
                self.random.shuffle(idle)
                pair = idle.pop(), idle.pop()
                way = self._request(*pair)
                next(way)
                busy.append((way, pair))
                num_begun += 1
            wait([engine.pipe for _, pair in busy for engine in pair])
            for entry in busy.copy():
                way, pair = entry
                if not any(engine.pipe.poll() for engine in pair):
                    continue
                try:
                    next(way)
                except StopIteration:
                    busy.remove(entry)
                    idle += pair
        return self.counts

    def _request(self, first: Process, second: Process) -> Any:
        """Yields while an engine has to do something for it."""
        random = self.random
        own = random.choices(range(VOCAB_SIZE), k=random.randrange(1, 80))
        asked = random.choice(self.bases)[: random.randrange(261)] + own
        salt = "mine" if random.random() < 0.1 else ""
        sampling = sampled(3, temperature=1.0, seed=random.randrange(99))
        sampling = sampling if random.random() < 0.6 else greedy(3)
        draw = random.random()
        if draw < 0.02:
            second.begin("forget")
            yield
            second.pipe.recv()
        if draw > 0.9:  # by one alone, warm where the other is cold
            params = None
        else:
            first.begin("prefill", asked, salt)
            yield
            params = first.pipe.recv()
        if draw > 0.8:  # the second has computed it by itself
            second.begin("decode", asked, salt, None, greedy(1))
            yield
            second.pipe.recv()
        second.begin("decode", asked, salt, params, sampling)
        yield
        self._judge(asked, params, sampling, second.pipe.recv())

    def _judge(self, asked: list[int], params: Any, sampling: Any, found: dict[str, Any]) -> None:
        counts = self.counts
        assert found["tokens"] == self.tiny.expected(asked, sampling), asked
        assert found["bytes"] == found["expected_bytes"], (asked, found)
        assert not found["failed"]
        counts["requests"] += 1
        counts["bytes"] += found["bytes"]
        if params is None:
            counts["by one alone"] += 1
        elif not found["bytes"]:
            counts["nothing moved"] += 1
        elif found["bytes"] <= found["state_bytes"]:
            counts["a state, and at most a page"] += 1
            counts["attention's pages there, the state not"] += bool(found["has_pages"])
        else:
            counts["pages too"] += 1
        if found["bytes"]:
            assert found["reused"] == len(asked) - 1


def main() -> int:
    from tests.disaggregation.conftest import DIVIDES, save_small

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--transport", choices=("nixl", "socket"), default="nixl")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="of each engine")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tiny = save_small(Path(folder), **(DIVIDES if arguments.ranks > 1 else {}))
        given = tiny.folder, arguments.transport, {"tensor_parallel_size": arguments.ranks}
        engines = [Process(*given) for _ in range(arguments.engines)]
        for engine in engines:
            stack.callback(engine.close)
        counts = Traffic(tiny, engines, arguments.seed).run(arguments.requests)
        print(f"{arguments.engines} engines, {arguments.transport}:", dict(counts), flush=True)
        assert all(engine.do("check")[1] == 0 for engine in engines), "nothing is held"
    return 0


if __name__ == "__main__":
    sys.exit(main())
