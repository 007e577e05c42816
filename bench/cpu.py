"""Milepost on a CPU: decoding beside transformers, hit beside cold, the cache on beside off.

    python bench/cpu.py [--out FILE]

Every figure is a ratio within this one run. Tokens are compared first: a row whose two sides answer
differently is refused. The model has about 10 M random parameters; what it says doesn't matter.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import core
import rows
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from milepost import LLM, SamplingParams

SEED = 0
VOCAB = 6144
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
"""Three Gated DeltaNet layers to one attention layer: transformers' default pattern."""


class RefusedError(Exception):
    """Two sides of a comparison answered differently."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-cpu.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        reference = _checkpoint(folder)
        for part in (_decoding, _hit, _unique_traffic):
            with console.status((part.__doc__ or "").partition("\n")[0]):
                measured.append(part(folder, reference))
    with console.status("the core's cost per page"):
        measured.append(_core())
    common = rows.provenance() | {
        "seed": SEED,
        "model": "Qwen3.5 dense, random",
        **_size(reference),
    }
    rows.write(arguments.out, [common | row for row in measured])
    _show(console, measured)
    console.print(f"rows: {arguments.out}", style="dim")
    return 0 if all(row["reached"] for row in measured) else 1


def _decoding(folder: str, reference: Qwen3_5ForCausalLM) -> dict[str, Any]:
    """Greedy decoding of 16 sequences beside transformers' generate."""
    prompts = [_tokens(64, seed) for seed in range(16)]
    llm = _engine(folder)
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    batch = torch.tensor(prompts)
    options: dict[str, Any] = {
        "max_new_tokens": 128,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    untyped: Any = reference
    generate = untyped.generate

    def ours() -> list[list[int]]:
        llm.reset_prefix_cache()
        return [o.outputs[0].token_ids for o in _generate(llm, prompts, params)]

    def theirs() -> list[list[int]]:
        with torch.inference_mode():
            mask = torch.ones_like(batch)
            answers = generate(batch, attention_mask=mask, **options)
        tokens: list[list[int]] = answers[:, 64:].tolist()
        return tokens

    seconds = _alternate({"milepost": ours, "transformers": theirs}, repeats=5)
    return _row(
        "decode 16 sequences, 128 tokens each: milepost / transformers throughput",
        rows.paired_ratio(seconds["transformers"], seconds["milepost"]),
        at_least=1.5,
        seconds=seconds,
    )


def _hit(folder: str, _reference: object) -> dict[str, Any]:
    """Time to first token with 4096 of 4160 prompt tokens reused, beside cold."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm = _engine(folder)
    shared = _tokens(4096, 1)
    marked = {"prompt_token_ids": [*shared, *_tokens(64, 2)], "cache_marks": [4096]}
    counter = iter(range(3, 10_000))
    reused = []

    def cold() -> list[list[int]]:
        llm.reset_prefix_cache()
        return _answers(llm, marked, params)

    def hit() -> list[list[int]]:
        prompt = {"prompt_token_ids": [*shared, *_tokens(64, next(counter))]}
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        reused.append(output.num_cached_tokens)
        return []

    def again() -> None:
        if _answers(llm, marked, params) != answer:
            raise RefusedError("the repeated prompt answers differently")

    answer = cold()
    again()
    seconds = _alternate({"cold": cold, "hit": hit}, repeats=7, compare=False)
    if set(reused) != {4096}:
        raise RefusedError(f"reused {set(reused)} tokens, not 4096")
    return _row(
        "time to first token, 4160-token prompt: cold / 4096 reused",
        rows.paired_ratio(seconds["cold"], seconds["hit"]),
        at_least=15,
        seconds=seconds,
    )


def _unique_traffic(folder: str, _reference: object) -> dict[str, Any]:
    """Traffic that shares nothing, cache on beside off."""
    engines = {"on": _engine(folder), "off": _engine(folder, enable_prefix_caching=False)}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [_tokens(500, 100 + seed) for seed in range(16)]

    def side(llm: LLM) -> Callable[[], list[list[int]]]:
        def serve() -> list[list[int]]:
            llm.reset_prefix_cache()
            return [o.outputs[0].token_ids for o in _generate(llm, prompts, params)]

        return serve

    seconds = _alternate({name: side(llm) for name, llm in engines.items()}, repeats=11)
    return _row(
        "unique traffic, 16 x (500 in, 64 out): cache on / off throughput",
        rows.paired_ratio(seconds["off"], seconds["on"]),
        at_least=0.97,
        seconds=seconds,
    )


def _core() -> dict[str, Any]:
    """Core time per page of a 100,000-token prompt with 100,000 and with 1,000 cached pages."""
    few, many = (core.measure(num, warm=False, repeats=21) for num in (1_000, 100_000))
    row = _row(
        "core time per page, 100,000-token prompt: 100,000 / 1,000 cached pages",
        many["total"] / few["total"],
        at_most=1.3,
    )
    return row | {"us_per_page_1000": few, "us_per_page_100000": many}


def _alternate(
    sides: dict[str, Callable[[], Any]], *, repeats: int, compare: bool = True
) -> dict[str, list[float]]:
    """Seconds of each side, taken in turn so that both see the same machine; one warm-up each."""
    answers = [call() for call in sides.values()]
    if compare and any(answer != answers[0] for answer in answers):
        raise RefusedError(f"{' and '.join(sides)} answer differently")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _row(
    name: str,
    ratio: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    seconds: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    reached = (at_least is None or ratio >= at_least) and (at_most is None or ratio <= at_most)
    goal = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    times = {side: rows.percentiles(taken) for side, taken in (seconds or {}).items()}
    return {"name": name, "ratio": ratio, "goal": goal, "reached": reached, "times": times}


def _checkpoint(folder: str) -> Qwen3_5ForCausalLM:
    torch.manual_seed(SEED)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**MODEL))
    model.eval()
    model.save_pretrained(folder)
    return model


def _size(model: torch.nn.Module) -> dict[str, int]:
    return {"num_parameters": sum(p.numel() for p in model.parameters())}


def _engine(folder: str, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, device="cpu", **options)


def _tokens(num: int, seed: int) -> list[int]:
    return random.Random(f"{SEED}:{seed}").choices(range(VOCAB), k=num)


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Any:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def _answers(llm: LLM, prompt: dict[str, Any], params: SamplingParams) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompt, params, use_tqdm=False)]


def _show(console: Console, measured: list[dict[str, Any]]) -> None:
    table = Table("what", "ratio", "goal", "")
    for row in measured:
        table.add_row(
            row["name"], f"{row['ratio']:.2f}", row["goal"], "ok" if row["reached"] else "short"
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
