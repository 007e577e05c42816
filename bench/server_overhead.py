"""What HTTP and a process of its own cost, beside the offline API on the same requests.

    python bench/server_overhead.py [--out FILE]

Saturation: all requests at once, the two sides in turn, from an empty cache each time. First token:
one prompt that is cached, asked again and again, the two sides in turn. Answers are compared first:
a run whose two sides answer differently is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import rows
from serving import serving

from milepost import LLM, SamplingParams
from milepost.load.client import Endpoint, Result
from milepost.load.workloads import words

ENGINE: dict[str, Any] = {"max_num_seqs": 64, "cpu_cache_gib": 1.0}
FLAGS = ("--max-num-seqs", "64", "--cpu-cache-gib", "1.0")


def conversations(count: int) -> list[list[dict[str, str]]]:
    rng = random.Random(0)
    systems = [words(rng, 120) for _ in range(4)]
    return [
        [
            {"role": "system", "content": systems[i % 4]},
            {"role": "user", "content": words(rng, 30)},
        ]
        for i in range(count)
    ]


async def all_at_once(url: str, asked: list[Any], max_tokens: int) -> tuple[list[Result], float]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        endpoint = Endpoint(
            http,
            url,
            model="milepost-tiny",
            api_key=None,
            options={"temperature": 0, "ignore_eos": True},
            clock=time.perf_counter,
        )
        start = time.perf_counter()
        results = await asyncio.gather(*(endpoint.ask(m, max_tokens) for m in asked))
        return results, time.perf_counter() - start


def saturation(llm: LLM, server: Any, args: argparse.Namespace) -> dict[str, Any]:
    asked = conversations(args.requests)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    offline_s, served_s, differing = [], [], 0
    for _ in range(args.repeats):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.chat(asked, params, use_tqdm=False)
        offline_s.append(time.perf_counter() - start)
        server.reset_cache()
        results, seconds = asyncio.run(all_at_once(server.url, asked, args.tokens))
        served_s.append(seconds)
        pairs = zip(outputs, results, strict=True)
        differing += sum(o.outputs[0].text != r.text for o, r in pairs)
    num_tokens = args.requests * args.tokens
    return {
        "bench": "server_saturation",
        "requests": args.requests,
        "output_tokens": args.tokens,
        "offline_tokens_per_s": round(num_tokens / statistics.median(offline_s), 1),
        "server_tokens_per_s": round(num_tokens / statistics.median(served_s), 1),
        "ratio": round(rows.paired_ratio(offline_s, served_s), 4),
        "ratios": [round(a / b, 4) for a, b in zip(offline_s, served_s, strict=True)],
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
