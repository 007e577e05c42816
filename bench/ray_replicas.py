"""Two replicas of the embedded model on Ray Serve under load: what prefix-aware routing hits beside
round-robin, what the simulator's fleet says of the same conversations, and what is lost when a
replica is killed.

    python bench/ray_replicas.py [--sessions 24] [--turns 5]

Conversations of random token ids that share a beginning in threes; a turn comes a while after the
answer before it. One JSON row for each routing and one for the kill. Needs `milepost[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import ray
import rows
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from milepost.ray import CostRouter, routed
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet import EngineLimits, Fleet, Shape
from milepost.simulator.policies import POLICIES, CachePolicy
from milepost.simulator.trace import read_trace

PAGE = 64
ANSWER = 8
THINK_S = (1.5, 3.0)
DRAWS = 12
MEMORY = {"num_pages": 300, "num_slots": 60, "max_num_seqs": 8}
COST = CostModel(
    name="the embedded model on a core",
    step_s=0.01,
    prefill_token_s=0.001,
    attention_pair_s=0.0,
    decode_step_s=0.01,
    decode_seq_s=0.002,
    decode_context_s=0.0,
    page_token_bytes=1024,
    state_bytes=65536,
)
"""Of the simulator: only the order of things depends on it here."""


class RoundRobin(RequestRouter):
    """One replica after the other, whatever it has."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        turns: dict[Any, int] = self.__dict__.setdefault("turns", {})
        asked = pending_request.metadata.request_id if pending_request is not None else None
        if pending_request is not None and "asked" not in pending_request.kwargs:
            asked = None  # it only asks for a prompt's keys
        number = turns.setdefault(asked, len(turns))
        known = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        first = number % len(known)
        return [[replica] for replica in known[first:] + known[:first]]


Turn = tuple[list[int], float]
"""A prompt, and the seconds between the answer before it and this."""


def conversations(sessions: int, turns: int, seed: int) -> list[list[Turn]]:
    """Each conversation's turns; a prompt begins with the one before it."""
    draw = random.Random(seed)
    shared: list[int] = []
    found = []
    for number in range(sessions):
        if number % 3 == 0:
            shared = draw.choices(range(100, 2000), k=200)
        prompt, told = list(shared), []
        for _ in range(turns):
            prompt = prompt + draw.choices(range(100, 2000), k=draw.randrange(60, 160))
            told.append((prompt, draw.uniform(*THINK_S)))
        found.append(told)
    return found


# --- on Ray ---------------------------------------------------------------------------------------


@contextmanager
def replicas(router: type[RequestRouter]) -> Iterator[str]:
    """The address of two replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(routed({**MEMORY, "replicas": 2}, router), name="milepost")
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        serve.shutdown()
        ray.shutdown()


class Load:
    """Conversations side by side; what became of each request."""

    def __init__(self, url: str, told: list[list[Turn]]) -> None:
        self.url, self.told = url, told
        self.queries = self.hits = self.num_lost = self.num_done = self.under_way = 0
        self.ttft_s: list[float] = []

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._talk(session, turns) for turns in self.told))

    async def _talk(self, session: aiohttp.ClientSession, turns: list[Turn]) -> None:
        for prompt, think_s in turns:
            await asyncio.sleep(think_s)
            self.under_way += 1
            try:
                await self._ask(session, prompt)
            finally:
                self.under_way -= 1

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {"model": "milepost-tiny", "prompt": prompt, "max_tokens": ANSWER}
        body |= {"temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        async with session.post(self.url, json=body) as response:
            if response.status != 200:
                self.num_lost += 1
                return
            usage = (await response.json())["usage"]
        self.ttft_s.append(time.monotonic() - began)
        self.num_done += 1
        self.queries += usage["prompt_tokens"]
        self.hits += usage["prompt_tokens_details"]["cached_tokens"]


async def killing(load: Load, after_s: float) -> int:
    """Kill a replica in the middle of the load; how many requests it had then."""
    names = ray.util.list_named_actors(all_namespaces=True)
    name = next(each["name"] for each in names if "#Replica#" in each["name"])
    actor = ray.get_actor(name, namespace="serve")
    running = asyncio.create_task(load.run())
    await asyncio.sleep(after_s)
    num_there = 0
    while not num_there and not running.done():  # one that has something to lose
        num_there = await actor.get_num_ongoing_requests.remote()
    ray.kill(actor)
    await running
    return num_there


# --- in the simulator -----------------------------------------------------------------------------


def simulated(told: list[list[Turn]], routing: str) -> float:
    """The hit rate of two engines with the same memory."""
    ids: dict[tuple[int, ...], int] = {}
    lines: list[dict[str, Any]] = []
    for turn in range(len(told[0])):
        for number, turns in enumerate(told):
            prompt, think_s = turns[turn]
            ends = range(PAGE, len(prompt) + 1, PAGE)
            hashes = [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in ends]
            lines.append(
                {
                    "timestamp_ms": 1000 * turn,
                    "input_length": len(prompt),
                    "output_length": ANSWER,
                    "hash_ids": hashes,
                    "session": str(number),
                    "think_time": think_s,
                }
            )
    for line, turns in zip(lines, told, strict=False):  # the first of each
        line["timestamp_ms"] = 1000 * turns[0][1]
    first = sorted(lines[: len(told)], key=lambda line: line["timestamp_ms"])
    lines = first + [{**line, "timestamp_ms": 10_000} for line in lines[len(told) :]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("\n".join(map(json.dumps, lines)))
        trace = read_trace(path, block_size=PAGE)
    policy = POLICIES["auto-split"]
    assert isinstance(policy, CachePolicy), "its pages and slots are given"
    sizes = {"num_pages": MEMORY["num_pages"], "num_slots": MEMORY["num_slots"]}
    fleet = Fleet(
        trace,
        lambda: policy.cache(page_size=PAGE, **sizes),
        COST,
        Shape(num_engines=2, limits=EngineLimits(max_num_seqs=MEMORY["max_num_seqs"])),
        routing=routing,
        closed=True,
    )
    run = fleet.run()
    return run.hits / run.queries


def spread(told: list[list[Turn]], routing: str) -> dict[str, float]:
    """Who asks first decides who is sent where, so the same is simulated with other pauses."""
    found = []
    for seed in range(DRAWS):
        draw = random.Random(seed)
        paused = [[(prompt, draw.uniform(*THINK_S)) for prompt, _ in turns] for turns in told]
        found.append(simulated(paused, routing))
    mean = statistics.mean(found)
    return {"simulated": mean, "simulated_least": min(found), "simulated_most": max(found)}


def row(load: Load, told: list[list[Turn]], **more: Any) -> dict[str, Any]:
    """What a run measured."""
    counts = {"done": load.num_done, "lost": load.num_lost, "prompt_tokens": load.queries}
    sizes = {"sessions": len(told), "turns": len(told[0]), **MEMORY}
    return {**rows.provenance(), **sizes, **more, **counts, **rows.percentiles(load.ttft_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-ray-replicas.jsonl")
    parser.add_argument("--only", nargs="*", default=["round-robin", "prefix", "kill"])
    arguments = parser.parse_args()
    told = conversations(arguments.sessions, arguments.turns, arguments.seed)
    found = []
    for routing, router in (("round-robin", RoundRobin), ("prefix", CostRouter)):
        if routing not in arguments.only:
            continue
        with replicas(router) as url:
            load = Load(url, told)
            asyncio.run(load.run())
        rates = {"hit_rate": load.hits / load.queries, **spread(told, routing)}
        found.append(row(load, told, routing=routing, **rates))
        print(json.dumps(found[-1]), flush=True)
    if "kill" in arguments.only:
        with replicas(CostRouter) as url:
            load = Load(url, told)
            num_there = asyncio.run(killing(load, after_s=6.0))
        found.append(row(load, told, routing="prefix", in_flight_when_killed=num_there))
        print(json.dumps(found[-1]), flush=True)
    rows.write(arguments.out, found)


if __name__ == "__main__":
    main()
