"""Long prompts on one GPU: cold, again, and a decode step behind them.

    python bench/long_context.py --model bench/models/hybrid-9b --lengths 131072 262144 524288
    python bench/long_context.py --model bench/models/hybrid-35b-a3b \\
        --option 'quantization="fp8"' --option 'kv_cache_dtype="fp8"'

Dummy weights and random token ids from a seed; the configuration's maximum is raised to fit. One
JSON row for each length; times are wall-clock times of `generate`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import rows

from engine import Bench

NUM_OUT = 33
LENGTHS = [131_072, 262_144, 524_288]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=rows.ROOT / "bench/models/hybrid-9b")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    rows.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "long-context.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option)
    bench = _open(arguments.model, max(arguments.lengths), arguments.seed, options)
    common = {**rows.provenance(), "model": arguments.model.name, "options": options}
    found = []
    bench.generate([bench.tokens(min(arguments.lengths[0], 3000))], NUM_OUT)
    for length in arguments.lengths:
        row = measure(bench, length)
        print(json.dumps(row), flush=True)
        found.append({**common, "seed": arguments.seed, **row})
    rows.write(arguments.out, found)
    return 0


def _open(model: Path, longest: int, seed: int, options: dict[str, object]) -> Bench:
    from milepost import LLM, SamplingParams

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    limit = longest + 2 * NUM_OUT
    with tempfile.TemporaryDirectory() as folder:
        raised = config | {"max_position_embeddings": max(limit, config["max_position_embeddings"])}
        (Path(folder) / "config.json").write_text(json.dumps(raised), encoding="utf-8")
        given: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": limit, "seed": seed, **options}
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **given)
    return Bench(llm, SamplingParams, config["vocab_size"], random.Random(seed))


def measure(bench: Bench, length: int) -> dict[str, float]:
    """Seconds of one output token when nothing is known and when all is, and of a step between two
    more."""
    bench.llm.reset_prefix_cache()
    prompt = bench.tokens(length)
    cold_s, _, _ = bench.generate([prompt], 1)
    again_s, cached, _ = bench.generate([prompt], 1)
    whole_s, _, _ = bench.generate([prompt], NUM_OUT)
    return {
        "prompt": length,
        "cold_s": cold_s,
        "again_s": again_s,
        "cached": cached,
        "decode_step_s": (whole_s - again_s) / (NUM_OUT - 1),
    }


if __name__ == "__main__":
    sys.exit(main())
