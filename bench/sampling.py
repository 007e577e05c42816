"""What sampling costs on one GPU: decoding with the settings that people use beside greedy.

    python bench/sampling.py [--model bench/models/hybrid-35b-a3b] [--rounds 2]

Dummy weights and random token ids from a seed. One JSON row for each setting and number of
sequences, with its rate as a share of greedy's of the same round (medians over the rounds; settings
take turns), and one for each with what the sampler alone takes a step, host and device. Drawn
tokens of dummy weights differ more from sequence to sequence than greedy ones, so a step of many
may read more experts: the share holds that too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import rows
import torch

from milepost import LLM, SamplingParams
from milepost.models.folder import EMBEDDED_MODEL
from milepost.structured_outputs import StructuredOutputs

Row = dict[str, Any]

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
"""Of answers that do not end while they are measured."""
RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
SETTINGS: dict[str, Row] = {
    "greedy": {"temperature": 0.0},
    "recommended": RECOMMENDED,
    "presence_penalty": RECOMMENDED | {"presence_penalty": 1.5},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "schema": {"temperature": 0.0},
}
SHORT, LONG = 32, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-sampling.jsonl")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        load_format="dummy",
        tokenizer=str(EMBEDDED_MODEL),
        max_model_len=8192,
        max_num_seqs=64,
        seed=arguments.seed,
    )
    common = {**rows.provenance(), "model": Path(arguments.model).name, "seed": arguments.seed}
    found = []
    for row in chain(_rates(llm, arguments), _costs(llm, arguments)):
        print(json.dumps(row), flush=True)
        found.append(common | row)
    rows.write(arguments.out, found)
    return 0


def _rates(llm: LLM, arguments: argparse.Namespace) -> Iterator[Row]:
    """Tokens per second of decoding."""
    rng = random.Random(arguments.seed)
    vocab_size = llm.llm_engine.limits.vocab_size
    for num in arguments.sequences:
        prompts = [rng.choices(range(10, vocab_size), k=128) for _ in range(num)]
        rates: dict[str, list[float]] = {name: [] for name in arguments.settings}
        for turn in range(arguments.rounds + 1):
            for name in arguments.settings:
                seconds = [_generate(llm, prompts, name, length) for length in (SHORT, LONG)]
                if turn:  # the first is for warming up
                    rates[name].append(num * (LONG - SHORT) / (seconds[1] - seconds[0]))
        for name, found in rates.items():
            row = {"setting": name, "sequences": num, "tokens_per_s": statistics.median(found)}
            if "greedy" in rates:
                row["share"] = rows.paired_ratio(found, rates["greedy"])
            yield row


def _generate(llm: LLM, prompts: list[list[int]], name: str, num_out: int) -> float:
    params = []
    for number in range(len(prompts)):
        options: Row = {"max_tokens": num_out, "detokenize": False, "seed": number}
        if name == "schema" and number % 2 == 0:
            options["structured_outputs"] = StructuredOutputs(json=SCHEMA)
        else:
            options["ignore_eos"] = True
        params.append(SamplingParams(**options | SETTINGS[name]))
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
    return seconds


def _costs(llm: LLM, arguments: argparse.Namespace) -> Iterator[Row]:
    """Microseconds that the sampler takes a step on logits as a model's: the host's, and the
    device's while nothing else is queued.
    """
    sampler = getattr(llm.llm_engine.runner.executor, "_sampler", None)
    if sampler is None:
        return
    for num in arguments.sequences:
        logits = 2 * torch.randn(num, llm.llm_engine.limits.vocab_size, device="cuda").bfloat16()
        best = logits.argmax(-1)
        for name in arguments.settings:
            if name in ("greedy", "schema"):
                continue
            step_rows = [_sampling_row(name, number) for number in range(num)]
            ids = [f"{name}-{number}" for number in range(num)]
            host, device = [], []
            for turn in range(30):
                step = [replace(row, num_ahead=turn) for row in step_rows] if turn else step_rows
                torch.cuda.synchronize()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                torch.cuda._sleep(2_000_000)  # so that the host comes first
                events[0].record()
                start = time.perf_counter()
                with torch.inference_mode():
                    sampler.choose(ids, logits, best, step)
                host.append(time.perf_counter() - start)
                events[1].record()
                torch.cuda.synchronize()
                device.append(events[0].elapsed_time(events[1]))
            yield {
                "setting": name,
                "sequences": num,
                "host_us": 1e6 * statistics.median(host),
                "device_us": 1e3 * statistics.median(device),
            }


def _sampling_row(name: str, number: int) -> Any:
    from milepost.runner.sampling import SamplingRow

    params = SamplingParams(**SETTINGS[name])
    return SamplingRow(params=params, seed=number, tokens=[1, 2, 3], num_prompt_tokens=1)


if __name__ == "__main__":
    sys.exit(main())
