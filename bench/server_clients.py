"""What 1, 16, 64 and 256 clients get from a server: tokens a second, and when the first one comes.

    python bench/server_clients.py --model bench/models/hybrid-80b-8-layers [--clients 1 16 64 256]

Dummy weights, random token ids in, streams out, each client's next request when its last one is
over. Clients run in processes of their own and only count what comes. With `--shared`, prompts
begin alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import rows
from rich.console import Console
from rich.table import Table
from serving import serving

TOKENIZER = rows.ROOT / "src" / "milepost" / "tiny"
MAX_CLIENTS_A_PROCESS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each client asks, again and again."""

    url: str
    prompt_len: int
    shared_len: int
    output_len: int
    num_requests: int


@dataclass(slots=True)
class Seen:
    """What clients saw."""

    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    began: float = float("inf")
    ended: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-80b-8-layers"))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=6, help="of each client")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-clients.jsonl")
    arguments = parser.parse_args()
    flags = ("--model", arguments.model, "--load-format", "dummy", "--tokenizer", str(TOKENIZER))
    limits = ("--max-num-seqs", "256", "--max-model-len", "8192")
    table = Table(box=None)
    for column in ("clients", "tokens/s", "first token p50", "p99"):
        table.add_column(column, justify="right")
    found = []
    with serving([*flags, *limits]) as server:
        load = Load(
            url=f"{server.url}/v1/completions",
            prompt_len=arguments.prompt,
            shared_len=arguments.shared,
            output_len=arguments.output,
            num_requests=arguments.requests,
        )
        _run(load, 8)
        for num_clients in arguments.clients:
            seen = _run(load, num_clients)
            rate = seen.num_tokens / (seen.ended - seen.began)
            first = rows.percentiles(seen.ttft_s)
            p50_ms, p99_ms = (f"{1e3 * first[name]:.0f} ms" for name in ("p50_s", "p99_s"))
            table.add_row(str(num_clients), f"{rate:,.0f}", p50_ms, p99_ms)
            row = {"clients": num_clients, "tokens_per_s": rate, "first_token": first}
            found.append(rows.provenance() | {"model": arguments.model} | row)
    rows.write(arguments.out, found)
    Console(width=100).print(table)
    return 0


def _run(load: Load, num_clients: int) -> Seen:
    """Spread the clients over processes, and join what they saw."""
    num_processes = -(-num_clients // MAX_CLIENTS_A_PROCESS)
    shares = [num_clients // num_processes] * num_processes
    shares[0] += num_clients - sum(shares)
    tasks = [(load, share, seed) for seed, share in enumerate(shares)]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        parts = pool.starmap(_clients, tasks)
    whole = Seen()
    for part in parts:
        whole.num_tokens += part.num_tokens
        whole.ttft_s += part.ttft_s
        whole.began = min(whole.began, part.began)
        whole.ended = max(whole.ended, part.ended)
    return whole


def _clients(load: Load, num_clients: int, seed: int) -> Seen:
    return asyncio.run(_all(load, num_clients, seed))


async def _all(load: Load, num_clients: int, seed: int) -> Seen:
    seen = Seen(began=time.time())
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(
            *(_one(load, session, seen, 1000 * seed + index) for index in range(num_clients))
        )
    seen.ended = time.time()
    return seen


async def _one(load: Load, session: aiohttp.ClientSession, seen: Seen, seed: int) -> None:
    common, own = random.Random(0), random.Random(f"{seed} {time.time()}")
    shared = [common.randrange(10, 6000) for _ in range(load.shared_len)]
    for _ in range(load.num_requests):
        body = {
            "prompt": [*shared, *(own.randrange(10, 6000) for _ in range(load.prompt_len))],
            "max_tokens": load.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = time.monotonic()
        async with session.post(load.url, json=body) as response:
            response.raise_for_status()
            last, is_first = b"", True
            async for line in response.content:
                if is_first and line.startswith(b"data:"):
                    seen.ttft_s.append(time.monotonic() - asked)
                    is_first = False
                if line.startswith(b'data: {"') and b'"usage":{' in line:
                    last = line
            seen.num_tokens += json.loads(last[6:])["usage"]["completion_tokens"]


if __name__ == "__main__":
    sys.exit(main())
