"""What 1, 16, 64 and 256 clients get from a server: tokens a second, and when the first one comes.

    python bench/server_clients.py --model bench/models/hybrid-80b-8-layers [--clients 1 16 64 256]
        [--against ANOTHER_SRC --rounds 3]

Dummy weights, random token ids in, streams out, each client's next request when its last one is
over. Clients run in processes of their own and only count what comes. With `--shared`, prompts
begin alike. With `--against`, a server of another source tree stands beside ours on the same GPU,
and the two are asked in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import rows
from rich.console import Console
from rich.table import Table
from serving import Server, serving

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
    parser.add_argument("--rounds", type=int, default=1, help="the middle one is told")
    parser.add_argument("--against", type=Path, help="src of another version")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-clients.jsonl")
    arguments = parser.parse_args()
    table = Table(box=None)
    for column in ("clients", "of", "tokens/s", "first token p50", "p99", "beside the other"):
        table.add_column(column, justify="right")
    found: list[dict[str, Any]] = []
    with _servers(arguments) as servers:
        loads = {name: _load(server, arguments) for name, server in servers.items()}
        for load in loads.values():
            _run(load, 8)
        for num_clients in arguments.clients:
            rates = defaultdict(list)
            firsts: dict[str, list[float]] = defaultdict(list)
            for _ in range(arguments.rounds):
                for name, load in loads.items():
                    seen = _run(load, num_clients)
                    rates[name].append(seen.num_tokens / (seen.ended - seen.began))
                    firsts[name] += seen.ttft_s
                    rate = f"{rates[name][-1]:,.0f} tokens/s"
                    print(f"{num_clients} clients, {name}: {rate}", flush=True)
            for name in loads:
                row = _row(name, num_clients, rates, firsts)
                table.add_row(*_cells(row))
                found.append(rows.provenance() | {"model": arguments.model} | row)
            rows.write(arguments.out, found)
    Console(width=100).print(table)
    return 0


@contextmanager
def _servers(arguments: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Ours, and the other one if there is one; each takes half of the memory then."""
    model = ("--model", arguments.model, "--load-format", "dummy", "--tokenizer", str(TOKENIZER))
    flags = [*model, "--max-num-seqs", "256", "--max-model-len", "8192"]
    if arguments.against is None:
        with serving(flags) as ours:
            yield {"ours": ours}
        return
    first, both = ("--gpu-memory-utilization", "0.45"), ("--gpu-memory-utilization", "0.9")
    with (
        serving([*flags, *first], source=arguments.against) as other,
        serving([*flags, *both]) as ours,
    ):
        yield {"other": other, "ours": ours}


def _load(server: Server, arguments: argparse.Namespace) -> Load:
    return Load(
        url=f"{server.url}/v1/completions",
        prompt_len=arguments.prompt,
        shared_len=arguments.shared,
        output_len=arguments.output,
        num_requests=arguments.requests,
    )


def _row(
    name: str,
    num_clients: int,
    rates: Mapping[str, Sequence[float]],
    firsts: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    row = {
        "clients": num_clients,
        "of": name,
        "tokens_per_s": statistics.median(rates[name]),
        "rounds": rates[name],
        "first_token": rows.percentiles(firsts[name]),
    }
    if name == "ours" and "other" in rates:
        row["beside_the_other"] = rows.paired_ratio(rates["ours"], rates["other"])
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    p50_ms, p99_ms = (f"{1e3 * row['first_token'][name]:.0f} ms" for name in ("p50_s", "p99_s"))
    ratio = f"{row['beside_the_other']:.3f}" if "beside_the_other" in row else ""
    return [
        str(row["clients"]),
        row["of"],
        f"{row['tokens_per_s']:,.0f}",
        p50_ms,
        p99_ms,
        ratio,
    ]


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
