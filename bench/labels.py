"""Many prompts that share 369 tokens and add one to four, ten tokens out: cache on beside off.

    python bench/labels.py [--model bench/models/hybrid-27b-fp8 ...] [--prompts 2000] [--memory 24]

The workload of https://github.com/vllm-project/vllm/issues/36010, where 2,000 prompts took 374 s on
two RTX 3090 with Qwen3.6-27B in four bits, with vLLM's prefix caching as without. All prompts are
given at once, and 128 may run. `--memory` gives the engine as much as a GPU with so many GiB has.
Dummy weights and random token ids from a seed; answers have no form, since dummies would fill it
with anything. One JSON row for each engine, and one with the ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import rows
import torch

import milepost
from milepost.config import EngineConfig

SHARED, OWN = 369, (1, 4)
MODELS = [f"bench/models/{name}" for name in ("hybrid-27b-fp8", "hybrid-27b-awq")]
GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--memory", type=float, help="in GiB; by default all of the GPU's")
    rows.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-labels.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option) | _memory(arguments.memory)
    common = {**rows.provenance(), "options": options, "seed": arguments.seed}
    found = []
    for model in arguments.model:
        pair = {}
        for cache in ("on", "off"):
            row = _run(str(rows.ROOT / model), arguments, options, is_on=cache == "on")
            pair[cache] = row["seconds"]
            found.append({"model": Path(model).name, "cache": cache, **row})
            print(json.dumps(found[-1]), flush=True)
        found.append({"model": Path(model).name, "times_as_fast": pair["off"] / pair["on"]})
        print(json.dumps(found[-1]), flush=True)
    rows.write(arguments.out, [common | row for row in found])
    return 0


def _memory(gib: float | None) -> dict[str, float]:
    if gib is None:
        return {}
    total = torch.cuda.mem_get_info()[1]
    return {"gpu_memory_utilization": EngineConfig().gpu_memory_utilization * gib * GIB / total}


def _run(
    model: str, arguments: argparse.Namespace, options: dict[str, object], *, is_on: bool
) -> dict[str, float]:
    begin = time.perf_counter()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": 128,
        "max_model_len": 4096,
        **options,
    }
    llm = milepost.LLM(
        model,
        skip_tokenizer_init=True,
        enable_prefix_caching=is_on,
        seed=arguments.seed,
        **settings,
    )
    start_s = time.perf_counter() - begin
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = random.Random(arguments.seed)
    params = milepost.SamplingParams(temperature=0.0, max_tokens=10, min_tokens=4, detokenize=False)

    def tokens(num: int) -> list[int]:
        return rng.choices(range(10, vocab_size), k=num)

    llm.generate([{"prompt_token_ids": tokens(SHARED)} for _ in range(8)], params, use_tqdm=False)
    shared = tokens(SHARED)
    prompts = [
        {"prompt_token_ids": [*shared, *tokens(rng.randint(*OWN))]}
        for _ in range(arguments.prompts)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    llm.close()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    num_prompt = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    return {
        "start_s": start_s,
        "seconds": seconds,
        "prompts": len(prompts),
        "cached_share": sum(output.num_cached_tokens or 0 for output in outputs) / num_prompt,
        "tokens_out": statistics.mean(len(output.outputs[0].token_ids) for output in outputs),
    }


if __name__ == "__main__":
    sys.exit(main())
