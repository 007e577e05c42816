"""Whether a model runs in the memory of smaller GPUs: the start, hits and eight chats.

    python bench/fits.py [--memory 24 32 48] [--model bench/models/hybrid-27b-awq ...]

`gpu_memory_utilization` gives each engine as much of this GPU as one with so many GiB would have.
No other flag is set. Dummy weights and random token ids from a seed. One JSON row for each start,
with what `milepost plan` expects beside what the engine has.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows
import torch

import milepost
from engine import Bench, Row, chats
from milepost.config import EngineConfig

GIB = 2**30
MODELS = [f"bench/models/{name}" for name in ("hybrid-27b-awq", "hybrid-35b-a3b-awq")]
PLAN = """
import json, sys
from milepost.config import EngineConfig
from milepost.engine.assembly.planning import DRIVER_BYTES, MemoryPlanner
from milepost.kernels.platform.device import find_chip
from milepost.kernels.platform.pretending import pretend
model, share, total, chip = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with pretend(find_chip(chip)) as meter:
    config = EngineConfig(model=model, gpu_memory_utilization=share)
    plan = MemoryPlanner(meter).plan(config, total)
print(json.dumps({"planned_context": plan.max_model_len, "planned_cache": plan.cache_bytes,
    "planned_steps": plan.step_bytes.total}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--memory", nargs="+", type=float, default=[24, 32, 48], help="in GiB")
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-fits.jsonl")
    arguments = parser.parse_args()
    common = {**rows.provenance(), "seed": arguments.seed}
    found = []
    for model in arguments.model:
        for size in arguments.memory:
            row = {"model": Path(model).name, "gib": size}
            row |= _run(str(rows.ROOT / model), size * GIB, arguments.seed)
            print(json.dumps(row), flush=True)
            found.append(common | row)
    rows.write(arguments.out, found)
    return 0


def _run(model: str, num_bytes: float, seed: int) -> Row:
    free, total = torch.cuda.mem_get_info()
    utilization = EngineConfig().gpu_memory_utilization
    share = num_bytes * utilization / total
    planning = _planned(model, share, total)
    begin = time.perf_counter()
    llm = milepost.LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=share,
        seed=seed,
    )
    row: Row = {"start_s": time.perf_counter() - begin}
    parts = llm.llm_engine
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    bench = Bench(llm, milepost.SamplingParams, vocab_size, random.Random(seed))
    row |= {
        "context": parts.limits.max_model_len,
        "cache": parts.facts.cache_bytes,
        "step_tokens": parts.facts.step_tokens,
        "used": free - torch.cuda.mem_get_info()[0],
    }
    for part in _work(bench):
        row |= part
    row["used_after"] = free - torch.cuda.mem_get_info()[0]
    row["fits"] = row["used_after"] <= num_bytes
    llm.close()
    del llm, bench, parts
    gc.collect()
    torch.cuda.empty_cache()
    said, _ = planning.communicate()
    planned: dict[str, Any] = json.loads(said.splitlines()[-1])
    return row | planned


def _work(bench: Bench) -> Iterator[Row]:
    prompt = bench.tokens(8000)
    cold_s, cold, _ = bench.generate([prompt], 1)
    again_s, again, _ = bench.generate([prompt], 1)
    yield {"cold_s": cold_s, "cold_cached": cold, "again_s": again_s, "again_cached": again}
    (found,) = chats(bench)
    yield {f"chats_{name}": value for name, value in found.items()}


def _planned(model: str, share: float, total: int) -> subprocess.Popen[str]:
    """Begins to plan without a GPU, in a process that pretends to have one."""
    major, minor = torch.cuda.get_device_capability()
    command = [sys.executable, "-c", PLAN, model, str(share), str(total), f"sm_{major}{minor}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    sys.exit(main())
