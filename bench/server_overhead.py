"""What HTTP and a process of its own cost, beside the offline API on the same requests.

    python bench/server_overhead.py [--out FILE]

Saturation: all requests at once, the two sides in turn, from an empty cache each time. The client
is a third process on the same cores: it only keeps what comes and reads it when the clock has
stopped, and what each process takes is told, in CPU seconds for 1,000 tokens (other work on the
machine moves them less than the times). First token: one prompt that is cached, asked again and
again, the two sides in turn. Answers are compared first: a run whose two sides answer differently
is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import rows
from serving import cpu_s, serving

from milepost import LLM, SamplingParams
from milepost.load.client import Endpoint
from milepost.load.workloads import words

ENGINE: dict[str, Any] = {"max_num_seqs": 64, "cpu_cache_gib": 1.0}
FLAGS = ("--max-num-seqs", "64", "--cpu-cache-gib", "1.0")


def conversations(count: int) -> list[list[Mapping[str, Any]]]:
    rng = random.Random(0)
    systems = [words(rng, 120) for _ in range(4)]
    return [
        [
            {"role": "system", "content": systems[i % 4]},
            {"role": "user", "content": words(rng, 30)},
        ]
        for i in range(count)
    ]


class Exchange(asyncio.Protocol):
    """Sends one request, and keeps what comes back until the server closes the connection."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.received = bytearray()
        self.is_over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over.set_result(error)

    def text(self) -> str:
        """The answer; whatever broke it off shows in what it lacks."""
        lines = self.received.split(b"\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)


def request(messages: list[dict[str, str]], max_tokens: int) -> bytes:
    fields = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": max_tokens}
    body = json.dumps({"messages": messages, **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def all_at_once(url: str, asked: list[Any], max_tokens: int) -> tuple[list[Exchange], float]:
    """What came back, and the seconds until all of it was there."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    requests = [request(messages, max_tokens) for messages in asked]

    async def exchange(sent: bytes) -> Exchange:
        _, own = await loop.create_connection(
            lambda: Exchange(sent), address.hostname or "", address.port or 80
        )
        await own.is_over
        return own

    start = time.perf_counter()
    exchanges = await asyncio.gather(*map(exchange, requests))
    return exchanges, time.perf_counter() - start


def saturation(llm: LLM, server: Any, args: argparse.Namespace) -> dict[str, Any]:
    asked = conversations(args.requests)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    processes = {**server.pids(), "client": os.getpid()}
    offline_s, served_s, differing = [], [], 0
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats):
        llm.reset_prefix_cache()
        start, own = time.perf_counter(), cpu_s(os.getpid())
        outputs = llm.chat(asked, params, use_tqdm=False)
        offline_s.append(time.perf_counter() - start)
        spent["offline"].append(cpu_s(os.getpid()) - own)
        server.reset_cache()
        before = {name: cpu_s(pid) for name, pid in processes.items()}
        exchanges, seconds = asyncio.run(all_at_once(server.url, asked, args.tokens))
        served_s.append(seconds)
        for name, pid in processes.items():
            spent[name].append(cpu_s(pid) - before[name])
        pairs = zip(outputs, exchanges, strict=True)
        differing += sum(o.outputs[0].text != e.text() for o, e in pairs)
    num_tokens = args.requests * args.tokens
    return {
        "bench": "server_saturation",
        "requests": args.requests,
        "output_tokens": args.tokens,
        "offline_tokens_per_s": round(num_tokens / statistics.median(offline_s), 1),
        "server_tokens_per_s": round(num_tokens / statistics.median(served_s), 1),
        "ratio": round(rows.paired_ratio(offline_s, served_s), 4),
        "ratios": [round(a / b, 4) for a, b in zip(offline_s, served_s, strict=True)],
        "cpu_s_per_1000_tokens": {
            name: round(1000 * statistics.median(values) / num_tokens, 3)
            for name, values in spent.items()
        },
        "load_average": os.getloadavg()[0],
        "answers_that_differ": differing,
    }


def first_token(llm: LLM, server: Any, args: argparse.Namespace) -> dict[str, Any]:
    asked = conversations(1)[0]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def offline() -> float:
        start = time.perf_counter()
        stream = llm.stream_chat(asked, params)
        next(stream)
        seconds = time.perf_counter() - start
        list(stream)
        return seconds

    async def turns() -> tuple[list[float], list[float]]:
        ours, theirs = [], []
        async with aiohttp.ClientSession() as http:
            endpoint = Endpoint(
                http,
                server.url,
                model="milepost-tiny",
                api_key=None,
                options={"temperature": 0, "ignore_eos": True},
                clock=time.perf_counter,
            )
            for turn in range(args.turns + 5):
                result = await endpoint.ask(asked, 2)
                assert result.first is not None, result.error
                pair = (offline(), result.first - result.start)
                if turn >= 5:
                    ours.append(pair[0])
                    theirs.append(pair[1])
        return ours, theirs

    ours, theirs = asyncio.run(turns())
    return {
        "bench": "server_first_token_cached",
        "turns": args.turns,
        **{f"offline_{k}": round(v, 5) for k, v in rows.percentiles(ours).items()},
        **{f"server_{k}": round(v, 5) for k, v in rows.percentiles(theirs).items()},
        "added_ms": round(1000 * (statistics.median(theirs) - statistics.median(ours)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(**ENGINE)
    with serving(FLAGS) as server:
        found = [first_token(llm, server, args), saturation(llm, server, args)]
    found = [{**row, **rows.provenance()} for row in found]
    for row in found:
        print(row)
    if args.out is not None:
        rows.write(args.out, found)


if __name__ == "__main__":
    main()
