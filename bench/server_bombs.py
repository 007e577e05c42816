"""One stream while hostile requests come: how long are the gaps between its tokens?

    python bench/server_bombs.py [--quiet-s 20] [--out FILE]

A client streams one answer after the other, alone first, then while every request of
`tests/server/bombs.py` is sent, one at a time. Shown are the gaps between deliveries, the status
codes, the slowest requests, and the memory of both processes before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import rows
from serving import rss_mib, serving

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.bombs import BODIES

OTHER = {"prompt": "The method str.split", "max_tokens": 200, "temperature": 0, "stream": True}
FLAGS = ("--port", "0", "--cpu-cache-gib", "0.5", "--max-num-seqs", "16")


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


async def attack(url: str) -> tuple[Counter[int], dict[str, float]]:
    """Every hostile body; what was answered, and the seconds that each took."""
    statuses: Counter[int] = Counter()
    spent: dict[str, float] = {}
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http:
        for name, (path, body) in BODIES.items():
            start = time.perf_counter()
            async with http.post(url + path, data=body, headers=headers) as response:
                await response.read()
            statuses[response.status] += 1
            spent[name] = time.perf_counter() - start
    return statuses, spent


async def measure(url: str, quiet_s: float) -> dict[str, Any]:
    quiet: list[float] = []
    attacked: list[float] = []
    async with aiohttp.ClientSession() as http:
        alone = asyncio.create_task(stream(http, url, quiet))
        await asyncio.sleep(quiet_s)
        alone.cancel()
        beside = asyncio.create_task(stream(http, url, attacked))
        statuses, spent = await attack(url)
        beside.cancel()
        await asyncio.gather(alone, beside, return_exceptions=True)
    slowest = sorted(spent, key=lambda name: -spent[name])[:8]
    return {
        "quiet": rows.percentiles(quiet),
        "attacked": rows.percentiles(attacked),
        "longest_gap_s": round(max(attacked), 3),
        "statuses": dict(statuses),
        "slowest": {name: round(spent[name], 2) for name in slowest},
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
