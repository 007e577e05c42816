"""Where the time of a step goes on a GPU: decode steps, the step behind a hit, a cold chunk.

    python bench/profile_step.py [--model bench/models/hybrid-35b-a3b] [--sequences 1]
        [--cold 8192] [--option 'quantization="fp8"'] [--out FILE]

Prints, for each, the kernels by their share of the device's time, the time in which none ran, and
every call in which the host waited for the device. Kernels overlap: the time of one counts from the
end of those before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import rows
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from milepost import LLM, SamplingParams

_WAITS = ("Synchronize", "cudaMemcpy", "aten::item", "aten::_local_scalar_dense")
_NOT_WAITING = ("cudaMemcpyAsync",)
_IDLE = "nothing, before "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument("--cold", type=int, default=0, help="tokens of a chunk of its own")
    rows.add_option(parser)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "profile-step.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option)
    llm = LLM(
        arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=40960,
        max_num_seqs=64,
        **options,
    )
    rng = random.Random(0)
    vocab = llm.llm_engine.limits.vocab_size

    def tokens(num: int) -> list[int]:
        return rng.choices(range(10, vocab), k=num)

    shared = tokens(1900)
    for _ in range(3):
        _ask(llm, [[*shared, *tokens(64)]], 1)
    common = {
        **rows.provenance(),
        "model": Path(arguments.model).name,
        "options": options,
    }
    found = []
    for num in arguments.sequences:
        prompts = [tokens(128) for _ in range(num)]
        _ask(llm, prompts, 40)
        run = partial(_steps, llm, prompts, 20)
        found.append(_measure(f"decode, {num} sequences", arguments.top, run))
    run = partial(_hits, llm, shared, tokens)
    found.append(_measure("64 tokens behind a hit", arguments.top, run))
    if arguments.cold:
        cold = [[tokens(arguments.cold)] for _ in range(5)]
        _ask(llm, cold.pop(), 1)
        run = partial(_prompts, llm, cold)
        found.append(_measure(f"{arguments.cold} tokens, cold", arguments.top, run))
    rows.write(arguments.out, [common | row for row in found])
    return 0


def _ask(llm: LLM, prompts: list[list[int]], num_out: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def _steps(llm: LLM, prompts: list[list[int]], num_steps: int) -> tuple[Any, int]:
    """Profile decode steps in mid-answer."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    streams: list[Any] = [llm.stream({"prompt_token_ids": prompt}, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    for _ in range(10):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_steps):
            engine.step()
    for stream in streams:
        stream.close()
    return profiled, num_steps


def _hits(llm: LLM, shared: list[int], tokens: Any) -> tuple[Any, int]:
    """Profile prompts of which all but 64 tokens are cached."""
    return _prompts(llm, [[[*shared, *tokens(64)]] for _ in range(5)])


def _prompts(llm: LLM, asked: list[list[list[int]]]) -> tuple[Any, int]:
    """Profile one output token for each of these."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for prompts in asked:
            _ask(llm, prompts, 1)
    return profiled, len(asked)


def _measure(title: str, top: int, run: Any) -> dict[str, Any]:
    profiled, num_steps = run()
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    launched = []
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            name = event.name.split("(")[0].split("<")[0][-60:]
            launched.append((event.time_range.end, event.time_range.start, name))
        elif _is_wait(event.name):
            waits[event.name] += 1
    launched.sort()
    before = first = min(start for _, start, _ in launched)
    for end, start, name in launched:
        for what, time_us in ((name, end - max(start, before)), (_IDLE + name, start - before)):
            if time_us > 0:
                kernels[what] += time_us
                counts[what] += 1
        before = end
    whole = (before - first) / num_steps
    busy = whole - sum(kernels[name] for name in kernels if name.startswith(_IDLE)) / num_steps
    console = Console(width=110)
    table = Table(title=f"{title}: {whole:.0f} us a step, in {busy:.0f} of them a kernel runs")
    for column in ("kernel", "us a step", "%", "times a step"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for name, time_us in kernels.most_common(top):
        share, per_step = 100 * time_us / kernels.total(), counts[name] / num_steps
        table.add_row(name, f"{time_us / num_steps:.1f}", f"{share:.1f}", f"{per_step:.1f}")
    console.print(table)
    per_step = {name: round(count / num_steps, 2) for name, count in waits.items()}
    console.print("waits of the host a step:", json.dumps(per_step))
    return {
        "step": title,
        "whole_us": whole,
        "kernels_us": busy,
        "kernels": {name: time_us / num_steps for name, time_us in kernels.most_common()},
        "waits": per_step,
    }


def _is_wait(name: str) -> bool:
    return any(part in name for part in _WAITS) and name not in _NOT_WAITING


if __name__ == "__main__":
    sys.exit(main())
