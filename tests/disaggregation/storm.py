"""Many transfers at once that are aborted, slow, too late or interrupted, at random moments.

    python -m tests.disaggregation.storm [--transport nixl] [--rounds 20] [--at-once 100]

Every request ends right or aborted, and both engines are afterwards what they were before.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from milepost.engine.loop.core import Engine
from milepost.engine.loop.group import RequestGroup
from tests.disaggregation.fleet import ONE_TOKEN, PREFILL, Fleet, connector_of, open_engine, running
from tests.engines import Tiny, greedy, tokens


def open_storm(tiny: Tiny, transport: str, at_once: int, **changes: Any) -> list[Engine]:
    """Two engines with room for so many transfers."""
    options = {
        "num_pages": 6 * at_once,
        "num_slots": 3 * at_once,
        "max_num_seqs": at_once,
        "extra": {"timeout_s": 5.0, "max_transfers": at_once},
        **changes,
    }
    return [open_engine(tiny.folder, transport, **options) for _ in range(2)]


class Storm:
    """Of `at_once` requests a round, that the first engine prefills and the second decodes. So many
    of their answers are compared with a plain loop's, which takes most of the time."""

    def __init__(
        self, tiny: Tiny, fleet: Fleet, at_once: int, seed: int, *, num_compared: int
    ) -> None:
        self.tiny, self.fleet, self.random = tiny, fleet, Random(seed)
        self.at_once, self.num_compared = at_once, num_compared
        self.counts: Counter[str] = Counter()
        self._slow: dict[int, float] = {}
        self._slow_down()

    def round(self) -> None:
        """All at once; some of each kind go wrong."""
        random, (first, second) = self.random, self.fleet.engines
        lengths = [random.randrange(70, 250) for _ in range(self.at_once)]
        prompts = [tokens(length, random.random()) for length in lengths]
        begun = [self.fleet.add(first, prompt, PREFILL, ONE_TOKEN) for prompt in prompts]
        self.fleet.run(*begun)
        jobs = [
            self.fleet.add(second, prompt, job.kv_transfer_params)
            for prompt, job in zip(prompts, begun, strict=True)
        ]
        doomed = random.sample(jobs, random.randrange(self.at_once + 1))
        fate = random.choice(["aborts", "aborts", "leases end", "interrupt"])
        at = random.randrange(30)
        for turn in range(20_000):
            if doomed and random.random() < 0.5:
                for _ in range(min(random.randrange(1, 20), len(doomed))):
                    second.abort(doomed.pop())
            if turn == at and fate == "leases end":
                connector_of(first).leases.end()
            if turn == at and fate == "interrupt":
                connector_of(second).end_loads()
            if not doomed and all(job.is_finished for job in jobs):
                break
            self._turn()
        self._judge(prompts, jobs)

    def _turn(self) -> None:
        if not any(e.has_work and not e.awaits_others for e in self.fleet.engines):
            self.fleet.wait()
        self.fleet.turn()

    def _judge(self, prompts: list[list[int]], jobs: list[RequestGroup]) -> None:
        compared = 0
        for prompt, job in zip(prompts, jobs, strict=True):
            request = job.completions[0].request
            assert request.finish_reason is not None, "it hangs"
            if request.finish_reason == "abort":
                self.counts["aborted"] += 1
                continue
            compared += 1
            if compared <= self.num_compared:
                assert request.output_token_ids == self.tiny.expected(prompt, greedy(4))
            self.counts["fetched" if request.report.loaded else "computed"] += 1
        self.fleet.until(lambda: not any(engine.has_work for engine in self.fleet.engines))
        for engine in self.fleet.engines:
            connector_of(engine).links.end_pulls()
        self.fleet.check()
        for engine in self.fleet.engines:
            assert not left(engine), left(engine)

    def _slow_down(self) -> None:
        """What is read takes from nothing to 50 ms longer than it does."""
        moving, random = (
            connector_of(self.fleet.engines[1]).transport,
            Random(self.random.random()),
        )
        is_done = moving.is_done

        def slowly(transfer: Any) -> bool:
            until = self._slow.setdefault(id(transfer), time.monotonic() + random.random() / 20)
            if time.monotonic() < until or not is_done(transfer):
                return False
            del self._slow[id(transfer)]
            return True

        moving.is_done = slowly


def left(engine: Engine) -> dict[str, Any]:
    """What is remembered of requests and leases that are over."""
    connector = connector_of(engine)
    links = connector.links
    held = {
        "wanted": connector._wanted,
        "fetching": connector._fetching,
        "finds": connector._finds,
        "leases": connector.leases._leases,
        "held_leases": links._held_leases._held,
        "claims": links._pulls._claims,
        "pulls": links._pulls._under_way,
        "loading": [None] * engine.scheduler.num_loading,
    }
    return {name: what for name, what in held.items() if what}


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class Held:
    """What NIXL holds for an engine."""

    registered: int
    """Bytes of what it tells others of the memory that is registered."""
    peers: int
    """Whose memory it can read."""
    transfers: int


def held_by_nixl(engine: Engine, others: list[Engine]) -> Held:
    agent = connector_of(engine).transport._agent
    names = [connector_of(other).transport._agent.name for other in others]
    handles = [each for each in gc.get_objects() if type(each).__name__ == "nixl_xfer_handle"]
    own = [each for each in handles if each._agent is agent.agent]
    return Held(
        registered=len(agent.get_agent_metadata()),
        peers=sum(map(agent.check_remote_metadata, names)),
        transfers=sum(not each._released for each in own),
    )


def main() -> int:
    from tests.disaggregation.conftest import save_small

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", choices=("nixl", "socket"), default="nixl")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = save_small(Path(folder))
        engines = open_storm(tiny, arguments.transport, arguments.at_once)
        with running(*engines) as fleet:
            at_once = arguments.at_once
            storm = Storm(tiny, fleet, at_once, arguments.seed, num_compared=at_once)
            for number in range(arguments.rounds):
                storm.round()
                print(number, dict(storm.counts), resources(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
