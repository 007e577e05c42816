"""Drawn traffic in the bitwise mode on the published shapes of models: bits beside cold runs alone.

    PYTHONPATH=src:. python bench/bitwise_traffic.py [--model bench/models/hybrid-9b ...]
        [--seeds 0 1] [--requests 60] [--option 'quantization="fp8"'] [--out FILE]

For each seed an engine with little memory is drawn, with tiers, drafts, steps ahead and a restart
now and then, and requests that go on from each other's prompts and answers, with sampling,
penalties, structured outputs, marks, priorities and aborts. Then one engine without a cache answers
each request alone: tokens, texts and log-probabilities must be equal, bit for bit. Dummy weights
and a small tokenizer. One JSON row for each model.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import rows
import torch
from tests.engine.drawing import WITH_HEAD, Asked, Sizes, differences, open_plain, serve
from tests.small_tokenizer import train_tokenizer

from milepost.engine.assembly import sizing

SIZES = Sizes(
    page_sizes=(64,),
    step_tokens=(130, 512, 512, 2048),
    max_model_lens=(1024, 2048),
    host_gib=(0.2, 2),
    words=8,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=["bench/models/hybrid-9b"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--requests", type=int, default=60, help="for each seed")
    parser.add_argument(
        "--gib", type=float, default=1, help="for pages and states, where no number is drawn"
    )
    rows.add_option(parser)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bitwise-traffic.jsonl")
    arguments = parser.parse_args()
    modes: dict[str, Any] = {
        "load_format": "dummy",
        "batch_invariant": True,
        "kv_cache_dtype": "auto",
        **dict(arguments.option),
    }
    found = []
    for model in arguments.model:
        with tempfile.TemporaryDirectory() as folder:
            row = _compare(Path(rows.ROOT / model), Path(folder), arguments, modes)
        row = {"model": Path(model).name, "options": dict(arguments.option), **row}
        print(json.dumps(row), flush=True)
        found.append(rows.provenance() | row)
    rows.write(arguments.out, found)
    return any(row["different"] for row in found)


def _compare(
    model: Path, folder: Path, arguments: argparse.Namespace, modes: dict[str, Any]
) -> dict[str, Any]:
    start = time.perf_counter()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    checkpoint = folder / "model"
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(str(checkpoint))
    config["eos_token_id"] = tokenizer.eos_token_id
    if config["model_type"] in WITH_HEAD:
        config["mtp_num_hidden_layers"] = 1
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked: list[Asked] = []
    for seed in arguments.seeds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizing, "free_bytes", lambda *_, **__: int(arguments.gib * 2**30))
            served, options = serve(
                seed,
                checkpoint,
                config["model_type"],
                folder / f"kept-{seed}",
                patch,
                num_requests=arguments.requests,
                sizes=SIZES,
                **modes,
            )
        asked += served
        shown = {name: options[name] for name in options if name not in modes}
        print(f"seed {seed}: {len(served)} requests, {shown}", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    plain = open_plain(checkpoint, max_model_len=max(SIZES.max_model_lens), page_size=64, **modes)
    wrong = [(each, different) for each in asked if (different := differences(each, plain, 0.0))]
    for each, different in wrong[:3]:
        print(f"{each.params}: {different[0][:2000]}", file=sys.stderr, flush=True)
    outputs = [each.job.output() for each in asked]
    return {
        "seeds": arguments.seeds,
        "requests": len(asked),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "answer_tokens": sum(len(c.token_ids) for output in outputs for c in output.outputs),
        "different": len(wrong),
        "seconds": round(time.perf_counter() - start),
    }


if __name__ == "__main__":
    sys.exit(main())
