"""Engines of one process that exchange KV and states, each driven in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milepost.config import EngineConfig
from milepost.disaggregation.exchange import Exchange
from milepost.engine.loop.core import Engine
from milepost.engine.loop.group import RequestGroup
from milepost.engine.prompts import Prompt
from milepost.sampling_params import SamplingParams
from tests.engines import greedy
from tests.invariants import check

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ONE_TOKEN = greedy(1, min_tokens=1)
PAGE = 64
MAX_ROUNDS = 20_000


def open_engine(folder: Path, transport: str, **options: Any) -> Engine:
    given = {"num_pages": 200, "num_slots": 24, "max_num_seqs": 4, "skip_tokenizer_init": True}
    extra = {"transport": transport, "timeout_s": 10.0, "peers": ["127.0.0.0/8"]}
    extra |= options.pop("extra", {})
    transfer = {"kv_port": 0, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    transfer["kv_ip"] = options.pop("ip", "127.0.0.1")
    return Engine(EngineConfig(model=str(folder), kv_transfer_config=transfer, **(given | options)))


class Fleet:
    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)
        self.last_prefill: RequestGroup | None = None

    def turn(self) -> None:
        """A step of each that has something to do; others hear what they are told."""
        for engine in self.engines:
            if engine.has_work:
                engine.step()
            else:
                engine.poll()

    def run(self, *jobs: RequestGroup) -> None:
        self.until(lambda: all(job.is_finished for job in jobs))

    def until(self, holds: Any) -> None:
        for _ in range(MAX_ROUNDS):
            if holds():
                return
            if not any(e.has_work and not e.awaits_others for e in self.engines):
                self.wait()
            self.turn()
        raise AssertionError("it never came to that")

    def wait(self) -> None:
        """Until some engine is told something."""
        import select

        select.select([engine.wakers[0] for engine in self.engines], [], [], 0.05)

    def prefill(self, engine: Engine, tokens: Sequence[int]) -> dict[str, Any] | None:
        """What the engine answers for the one that decodes."""
        job = engine.add(Prompt(token_ids=list(tokens), kv_transfer_params=PREFILL), ONE_TOKEN)
        self.run(job)
        self.last_prefill = job
        return job.kv_transfer_params

    def decode(
        self,
        engine: Engine,
        tokens: Sequence[int],
        params: dict[str, Any] | None,
        sampling: SamplingParams | None = None,
    ) -> RequestGroup:
        job = self.add(engine, tokens, params, sampling)
        self.run(job)
        return job

    def add(
        self,
        engine: Engine,
        tokens: Sequence[int],
        params: dict[str, Any] | None,
        sampling: SamplingParams | None = None,
    ) -> RequestGroup:
        prompt = Prompt(token_ids=list(tokens), kv_transfer_params=params)
        return engine.add(prompt, sampling or greedy(4))

    def check(self) -> None:
        """Nothing is held or lent any more, and every cache is whole."""
        self.until(lambda: not any(len(connector_of(e).leases) for e in self.engines))
        for engine in self.engines:
            engine.poll()
            cache = engine.scheduler.cache
            assert not cache.loans
            assert not cache.allocations
            check(cache)


@contextmanager
def running(*engines: Engine) -> Iterator[Fleet]:
    try:
        yield Fleet(*engines)
    finally:
        for engine in engines:
            engine.close()


def sizes(engine: Engine) -> tuple[int, int]:
    """Bytes of a page and of a state, on all ranks."""
    hello = connector_of(engine).links.hello
    pages, slots, _ = map(sum, hello.layout.piece_bytes)
    return pages * hello.num_ranks, slots * hello.num_ranks


def lacking(engine: Engine, tokens: Sequence[int], position: int, salt: str = "") -> int:
    """Bytes that an engine has to fetch to go on at that position."""
    cache = engine.scheduler.cache
    match = cache.match(cache.chain(tokens, salt))
    if position - match.state_length < PAGE:
        return 0
    page, state = sizes(engine)
    return page * (-(-position // PAGE) - len(match.path.nodes)) + state


def connector_of(engine: Engine) -> Any:
    """Returns what connects an engine with others, if something does."""
    found = [part.connector for part in engine.off_device if isinstance(part, Exchange)]
    return found[0] if found else None


def let_time_pass(engine: Engine, seconds: float) -> None:
    """Moves the clock that an engine's connections to others go by. Returns once its thread has
    looked."""
    links = connector_of(engine).links
    clock = links._peers._clock
    links._peers._clock = lambda: clock() + seconds
    for _ in range(2):  # its thread looks behind what it was told
        links.end_pulls()
