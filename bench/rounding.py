"""What it saves to round rows to float8 where they are made, instead of by launches that read them
again.

    python bench/rounding.py [--model bench/models/hybrid-35b-a3b] [--layers 0]
        [--tokens 2048 4096 8192] [--kernels 8192] [--out FILE]

First the layers' outputs are compared block by block, bit by bit, in prompts and in steps that mix
prompts and decodes; a difference ends the run. Then prompts of so many tokens are computed both
ways in turn, from the token ids to the first token: medians in milliseconds, and the median of the
pairs' ratios; those that have graphs in graphs of both ways. With `--kernels` the device's time by
kernel, both ways. `--layers 0` are all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import rows
import torch
from launches import shortened
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from milepost import LLM, SamplingParams
from milepost.kernels.layout import emit
from milepost.kernels.norm import triton as norm_triton
from milepost.layers.context import Context
from milepost.layers.parts import ResidualBlock
from milepost.runner.graphs import Graphs

_STEPS = ([70], [2049], [4100], [8192], [6000, 700, 5000])
"""Prompts that come together, whose blocks are compared."""
_FEW = 64
"""Up to so many rows were rounded where they are made before."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--layers", type=int, default=0, help="of the model's, the first")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "rounding.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(shortened(Path(arguments.model), arguments.layers, Path(folder))),
            load_format="dummy",
            skip_tokenizer_init=True,
            quantization="fp8",
            max_model_len=40960,
            max_num_seqs=8,
        )
    common = {**rows.provenance(), "model": Path(arguments.model).name, "layers": arguments.layers}
    for lengths in _STEPS:
        print(json.dumps(_compare(llm, lengths)), flush=True)
    for num_tokens in arguments.tokens:
        row = _measure(llm, num_tokens, arguments.repeats)
        print(json.dumps(row), flush=True)
        rows.write(arguments.out, [common | row])
    if arguments.kernels:
        _print_kernels(llm, arguments.kernels)
    return 0


@contextmanager
def by_launches() -> Iterator[None]:
    """Inside, many rows are rounded by launches of their own."""
    room_for = emit.room_for

    def few(num_tokens: int, *args: Any, **how: Any) -> Any:
        return None if num_tokens > _FEW else room_for(num_tokens, *args, **how)

    with mock.patch.object(norm_triton, "room_for", few):
        yield


def _ask(llm: LLM, lengths: list[int], num_out: int, rng: random.Random) -> float:
    vocab = llm.llm_engine.limits.vocab_size
    prompts = [{"prompt_token_ids": rng.choices(range(10, vocab), k=num)} for num in lengths]
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


def _compare(llm: LLM, lengths: list[int]) -> dict[str, Any]:
    """Each block of each step is run both ways on the same inputs and states."""
    run, sizes, differing = ResidualBlock.run, Counter[int](), []

    def both(
        block: ResidualBlock, hidden: Tensor, delta: Any, ctx: Context, *args: Any, **how: Any
    ) -> Any:
        kept = _states(ctx, args[0])
        with by_launches():
            expected = run(block, hidden, delta, ctx, *args, **how)
        for pool, slots, values in kept:
            pool[slots] = values
        found = run(block, hidden, delta, ctx, *args, **how)
        sizes[len(hidden)] += 1
        # Nothing is said of padding, nor of ends behind which nothing is sampled.
        ends = how.get("ends", False)
        num_real: Any = ctx.step.num_sampled if ends else ctx.num_real
        count = int(num_real)
        pairs = zip(expected, found, strict=True)
        same = [torch.equal(*(each[:count] for each in pair)) for pair in pairs]
        differing.extend([sum(sizes.values())] * (not all(same)))
        return found

    with (
        mock.patch.object(ResidualBlock, "run", both),
        mock.patch.object(Graphs, "find", return_value=None),
    ):
        _ask(llm, lengths, 3, random.Random(sum(lengths)))
    assert not differing, f"blocks {differing[:9]} of {sum(sizes.values())} differ, {lengths}"
    return {"prompts": lengths, "equal_blocks_by_tokens": dict(sizes)}


def _states(ctx: Context, numbers: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What a block's sequences have in the slots that they write."""
    slots = ctx.step.slot_out[ctx.step.slot_out >= 0].long()
    states = [ctx.states[number] for number in numbers if number in ctx.states]
    pools = [pool for state in states for pool in (state.conv, state.recurrent)]
    return [(pool, slots, pool[slots]) for pool in pools]


def _measure(llm: LLM, num_tokens: int, repeats: int) -> dict[str, Any]:
    """In graphs where there is one for so many."""
    executor: Any = llm.llm_engine.runner.executor
    rng = random.Random(num_tokens)
    ours, theirs = executor._graphs, Graphs()
    theirs._last = ours._last
    captured = [each for each in ours._graphs if not each.decodes and each.num_tokens == num_tokens]
    if captured:
        executor._graphs = theirs
        with by_launches():
            executor.capture(captured)
        executor._graphs = ours

    def before() -> float:
        executor._graphs = theirs
        with by_launches():
            return _ask(llm, [num_tokens], 1, rng)

    def after() -> float:
        executor._graphs = ours
        return _ask(llm, [num_tokens], 1, rng)

    pairs = [(before(), after()) for _ in range(repeats + 2)][2:]
    first, second = ([pair[way] for pair in pairs] for way in (0, 1))
    return {
        "tokens": num_tokens,
        "graph": bool(captured),
        "by_launches_ms": round(1e3 * statistics.median(first), 2),
        "where_made_ms": round(1e3 * statistics.median(second), 2),
        "ratio": round(rows.paired_ratio(first, second), 3),
    }


def _print_kernels(llm: LLM, num_tokens: int) -> None:
    """Microseconds and launches a step, both ways. Kernels overlap: the time of one counts from the
    end of those before."""
    rng = random.Random(1)

    def count() -> tuple[Counter[str], Counter[str]]:
        spent, times = Counter[str](), Counter[str]()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            _ask(llm, [num_tokens], 1, rng)
            torch.cuda.synchronize()
        ranges = [
            (each.time_range.end, each.time_range.start, each.name) for each in profiled.events()
        ]
        last = min(start for _, start, _ in ranges)
        for end, start, name in sorted(ranges):
            short = name.split("<")[0].split("(")[0][:34]
            spent["nothing"] += max(0, start - last)
            spent[short] += max(0, end - max(start, last))
            times[short] += 1
            last = max(last, end)
        return spent, times

    with by_launches():
        count()
        before = count()
    after = count()
    for name, _ in before[0].most_common(16):
        ways = [f"{way[0][name]:9.0f} us {way[1][name]:4}" for way in (before, after)]
        print(f"{name:34}", *ways, flush=True)
    print("all", *(round(sum(way[0].values())) for way in (before, after)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
