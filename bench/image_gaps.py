"""Gaps between tokens of streams while images arrive: what others wait for an image.

    python bench/image_gaps.py --model bench/models/hybrid-35b-a3b
    python bench/image_gaps.py --size 1920 1080 --every-s 0.25

Dummy weights with the large vision tower. Eight requests stream; first alone, then while a prompt
with a new 4K image and 200 tokens of text arrives every second, then while a prompt of 2,048 new
tokens of text does: a chunk of text is what an image may delay others by. One JSON row for each:
p50, p90, p99 and the longest of the gaps, and the arrivals' seconds to their first token. `slowest`
has the longest gaps and when they ended, in seconds after the first arrival. If this process's own
event loop was late, `longest_lag_s` says so; otherwise the engine was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import rows
from screenshots import END, PAD, START, open_with_tower, screenshot, text_of

TEXT_TOKENS, LONG_TOKENS = 200, 2048
NUM_SLOWEST, TICK_S = 12, 0.005


class Gap(NamedTuple):
    seconds: float
    ended_s: float


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=rows.ROOT / "bench/models/hybrid-35b-a3b")
    parser.add_argument("--size", type=int, nargs=2, default=(3840, 2160))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--arrivals", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=1.0)
    rows.add_option(parser)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "image_gaps.jsonl")
    arguments = parser.parse_args()
    from milepost import AsyncLLM

    options = {"max_num_seqs": arguments.streams + 8, **dict(arguments.option)}
    random_ = random.Random(0)
    # Made before, so that they take no time of the processes that are measured.
    images = [screenshot(arguments.size, random_) for _ in range(2 * arguments.arrivals + 1)]
    prompts: dict[str, Callable[[], Any]] = {
        "images": lambda: {
            "prompt_token_ids": [START, PAD, END, *text_of(random_, TEXT_TOKENS)],
            "multi_modal_data": {"image": images.pop()},
        },
        "text": lambda: {"prompt_token_ids": text_of(random_, LONG_TOKENS)},
    }
    common = {**rows.provenance(), "model": arguments.model.name, "options": options}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        llm = open_with_tower(AsyncLLM, Path(folder), arguments.model, **options)
        async with llm:
            await answer(llm, prompts["images"](), 1)  # what the first image warms up
            for name, make in (("nothing", None), *prompts.items()):
                row = await measure(llm, make, arguments)
                print(json.dumps({"arrives": name, **row}), flush=True)
                found.append({**common, "size": arguments.size, "arrives": name, **row})
    rows.write(arguments.out, found)
    return 0


async def measure(llm: Any, make: Callable[[], Any] | None, arguments: Any) -> dict[str, Any]:
    """Streams while prompts arrive; returns the gaps and the first tokens."""
    gaps: list[Gap] = []
    lags: list[float] = []
    random_ = random.Random(1)
    streams = [
        asyncio.create_task(stream(llm, text_of(random_, 100), gaps))
        for _ in range(arguments.streams)
    ]
    streams.append(asyncio.create_task(tick(lags)))
    await asyncio.sleep(2.0)
    gaps.clear()
    lags.clear()
    began, arrivals = time.perf_counter(), []
    for _ in range(arguments.arrivals):
        if make is not None:
            arrivals.append(asyncio.create_task(answer(llm, make(), 1)))
        await asyncio.sleep(arguments.every_s)
    first = [await each for each in arrivals]
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    own = {"first_token": rows.percentiles(first)} if first else {}
    slowest = sorted(gaps, key=attrgetter("seconds"), reverse=True)[:NUM_SLOWEST]
    return {
        "gaps": rows.percentiles([gap.seconds for gap in gaps]),
        "longest_s": slowest[0].seconds,
        "slowest": [(round(gap.seconds, 4), round(gap.ended_s - began, 3)) for gap in slowest],
        "longest_lag_s": round(max(lags), 4),
        "num_gaps": len(gaps),
        **own,
    }


async def tick(lags: list[float]) -> None:
    """Notes how late the event loop is, until it is cancelled."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - began - TICK_S)


async def stream(llm: Any, tokens: list[int], gaps: list[Gap]) -> None:
    """Notes the gaps between an answer's tokens, until it is cancelled."""
    from milepost import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=20_000, ignore_eos=True)
    last = None
    async for _ in llm.generate({"prompt_token_ids": tokens}, params):
        now = time.perf_counter()
        if last is not None:
            gaps.append(Gap(now - last, now))
        last = now


async def answer(llm: Any, prompt: Any, num_tokens: int) -> float:
    """Returns the seconds of an answer of so many tokens."""
    from milepost import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    async for _ in llm.generate(prompt, params):
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
