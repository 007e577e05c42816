"""One stream while hostile requests come: how long are the gaps between its tokens?

    python bench/server_bombs.py [--quiet-s 20] [--out FILE]

A client streams one answer after the other, alone first, then while every request of
`tests/server/bombs.py` is sent, bodies and bare connections, one at a time. Shown are the gaps
between deliveries and the requests that made the longest, the status codes, the slowest requests,
what is left of them, and the memory of the server's processes before and after. The goals: a p99
of the gaps within 3 times the quiet one, 300 MiB, and nothing left. A long prompt that is served as
any other ("spaces") makes the longest gap: one step prefills up to --max-num-batched-tokens of it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import rows
from serving import rss_mib, serving

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.bombs import BODIES, RAW

OTHER = {"prompt": "The method str.split", "max_tokens": 200, "temperature": 0, "stream": True}
FLAGS = (
    *("--cpu-cache-gib", "0.5", "--max-num-seqs", "16", "--head-timeout-s", "2"),
    *("--body-timeout-s", "2", "--grammar-timeout-s", "1"),
)


async def stream(http: aiohttp.ClientSession, url: str, gaps: list[float]) -> None:
    """Answers one after the other, until it is cancelled."""
    while True:
        body = {**OTHER, "ignore_eos": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            last = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


@dataclass(frozen=True, slots=True)
class Attack:
    statuses: Counter[int]
    spent: dict[str, float]
    """Seconds that each request took."""
    longest: dict[str, float]
    """The stream's longest gap meanwhile."""


async def attack(url: str, gaps: list[float]) -> Attack:
    """Send every hostile body, one at a time, beside a stream that notes its gaps."""
    statuses: Counter[int] = Counter()
    spent: dict[str, float] = {}
    longest: dict[str, float] = {}
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http:
        for name, (path, body) in BODIES.items():
            start, num_gaps = time.perf_counter(), len(gaps)
            async with http.post(url + path, data=body, headers=headers) as response:
                await response.read()
            statuses[response.status] += 1
            spent[name] = time.perf_counter() - start
            longest[name] = max(gaps[num_gaps:], default=0.0)
    for name, pieces in RAW.items():
        start = time.perf_counter()
        statuses[await connect(url, pieces)] += 1
        spent[f"connection: {name}"] = time.perf_counter() - start
    return Attack(statuses, spent, longest)


async def connect(url: str, pieces: list[bytes]) -> int:
    """Send pieces on a connection of their own; the status that comes back, 0 for none."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await reader.read(16)
        await reader.read()
    except ConnectionError:
        return 0
    finally:
        writer.close()
    return int(head[9:12] or 0)


async def left(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """What the server says that it holds, once it has noticed that no stream is open."""
    found = await held(http, url)
    for _ in range(50):
        if not any(found.values()):
            break
        await asyncio.sleep(0.1)
        found = await held(http, url)
    return found


async def held(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("num_requests_running", "num_requests_waiting")
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("milepost:")]
    return {name: sum(float(v) for key, v in found if f":{name}{{" in key) for name in names}


def p99(gaps: list[float]) -> float:
    return sorted(gaps)[int(0.99 * len(gaps))]


def largest(seconds: dict[str, float]) -> dict[str, float]:
    names = sorted(seconds, key=lambda name: -seconds[name])[:8]
    return {name: round(seconds[name], 2) for name in names}


async def measure(url: str, quiet_s: float) -> dict[str, Any]:
    quiet: list[float] = []
    attacked: list[float] = []
    async with aiohttp.ClientSession() as http:
        alone = asyncio.create_task(stream(http, url, quiet))
        await asyncio.sleep(quiet_s)
        alone.cancel()
        beside = asyncio.create_task(stream(http, url, attacked))
        done = await attack(url, attacked)
        beside.cancel()
        await asyncio.gather(alone, beside, return_exceptions=True)
        rest = await left(http, url)
    return {
        "quiet": rows.percentiles(quiet),
        "attacked": rows.percentiles(attacked),
        "p99_ratio": round(p99(attacked) / p99(quiet), 2),
        "num_bombs": len(done.spent),
        "left": rest,
        "longest_gap_s": round(max(attacked), 3),
        "longest_gaps": largest(done.longest),
        "statuses": dict(done.statuses),
        "slowest": largest(done.spent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quiet-s", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with serving(FLAGS) as server:
        before = {name: rss_mib(pid) for name, pid in server.pids().items()}
        row = rows.provenance() | asyncio.run(measure(server.url, arguments.quiet_s))
        after = {name: rss_mib(pid) for name, pid in server.pids().items()}
    row["grown_mib"] = {name: round(after[name] - before[name]) for name in before}
    print(row)
    if arguments.out:
        rows.write(arguments.out, [row])


if __name__ == "__main__":
    main()
