"""Many streaming clients for minutes, some of which leave at random: does anything leak or stick?

    python bench/server_load.py [--clients 200] [--seconds 300] [--out FILE]

Each request of a fixed set is answered alone first. Then every client streams requests of that set
one after the other; a third of the requests is given up after a random number of pieces. At the end
each answer that was read to its end must be the one that the request got alone, and pages, slots,
file descriptors and memory must be back where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import rows
from serving import Server, num_fds, rss_mib, serving

from milepost.load.workloads import words

STUCK_S = 240.0
"""A request that takes longer counts as stuck."""


PHASES = 4
"""Sizes are taken between them, with no client there: memory that is a cache fills once."""


def requests(count: int) -> list[dict[str, Any]]:
    """Half greedy, half sampled; a few system prompts; some tenants."""
    rng = random.Random(7)
    systems = [words(rng, 100) for _ in range(4)]
    made = []
    for number in range(count):
        request: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": systems[number % 4]},
                {"role": "user", "content": words(rng, rng.randint(5, 60))},
            ],
            "max_tokens": rng.randint(8, 64),
            "stream": True,
            "ignore_eos": True,
        }
        request |= {"temperature": 0} if number % 2 else {"seed": number}
        made.append(request | ({"cache_salt": f"tenant {number % 3}"} if number % 5 == 0 else {}))
    return made


async def ask(http: aiohttp.ClientSession, url: str, request: dict[str, Any], leave: int) -> str:
    """The answer; "" if the client left after `leave` pieces. Raises for anything unexpected."""
    text, pieces, finished = "", 0, False
    async with http.post(f"{url}/v1/chat/completions", json=request) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                finished = finished or line.startswith(b"data: [DONE]")
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            pieces += 1
            if pieces == leave:
                response.close()
                return ""
    if not finished:
        raise RuntimeError("the stream broke off")
    return text


async def client(
    number: int,
    http: aiohttp.ClientSession,
    url: str,
    asked: list[dict[str, Any]],
    alone: list[str],
    until: float,
    counts: Counter[str],
) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        index = rng.randrange(len(asked))
        leaves = rng.random() < 1 / 3
        leave = rng.randint(1, 20) if leaves else 0
        try:
            text = await asyncio.wait_for(ask(http, url, asked[index], leave), STUCK_S)
        except TimeoutError:
            counts["stuck"] += 1
        except (RuntimeError, aiohttp.ClientError) as error:
            counts[f"failed: {error}"] += 1
        else:
            counts["left" if leaves and not text else "complete"] += 1
            if text:
                counts["differ from the solo run"] += text != alone[index]


def sizes(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pid in server.pids().items():
        found[f"{name}_rss_mib"] = round(rss_mib(pid), 1)
        found[f"{name}_fds"] = num_fds(pid)
    for name in ("kv_cache_usage_perc", "state_cache_usage_perc"):
        found[name] = server.metric(f"milepost:{name}")
    for name in ("num_requests_running", "num_requests_waiting"):
        found[name] = server.metric(f"milepost:{name}")
    return found


async def run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    asked = requests(args.distinct)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    counts: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        alone = [await ask(http, server.url, request, 0) for request in asked]
    marks = [("after the solo runs", sizes(server))]
    start = time.monotonic()
    for phase in range(PHASES):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            until = time.monotonic() + args.seconds / PHASES
            clients = range(args.clients)
            await asyncio.gather(
                *(client(n, http, server.url, asked, alone, until, counts) for n in clients)
            )
        await settled(server)
        marks.append((f"after {phase + 1} of {PHASES} phases", sizes(server)))
    return {
        "bench": "server_load",
        "clients": args.clients,
        "seconds": round(time.monotonic() - start, 1),
        "requests": dict(counts),
        "disconnects_counted": server.metric("milepost:request_disconnects_total"),
        "marks": dict(marks),
    }


async def settled(server: Server) -> None:
    """Wait until the server has noticed that the last clients left, and has rested."""
    for _ in range(50):
        if not server.metric("milepost:num_requests_running"):
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--distinct", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--cpu-cache-gib", default="1.0")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    flags = ["--max-num-seqs", str(args.max_num_seqs), "--cpu-cache-gib", args.cpu_cache_gib]
    with serving(flags) as server:
        row = {**asyncio.run(run(server, args)), **rows.provenance()}
        status = server.process.poll()
    assert status is None, f"the server ended with {status}"
    print(json.dumps(row, indent=1))
    if args.out is not None:
        rows.write(args.out, [row])


if __name__ == "__main__":
    main()
