"""The engine's workloads on one GPU: repeats, system prompts, chats, agents, decoding, cold ones.

    python bench/engine.py [--engine milepost] [--model bench/models/hybrid-35b-a3b] [--only NAME]

Dummy weights and random token ids from a seed. Runs any engine with the Python API of vLLM (`LLM`,
`SamplingParams`, prompts as token ids, `num_cached_tokens`): name its package with --engine. One
JSON row for each workload; the times are wall-clock times of `generate`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows

Prompt = list[int]
Row = dict[str, Any]
SEQUENCES, ANSWER = (1, 16, 64), 288


@dataclass(slots=True)
class Bench:
    """An engine under test and the source of its prompts."""

    llm: Any
    params: Callable[..., Any]
    vocab_size: int
    rng: random.Random
    sequences: Sequence[int] = SEQUENCES
    """Numbers of sequences that `decode` runs at the same time."""
    answer: int = ANSWER
    """Tokens of their longer answers."""

    def tokens(self, num: int) -> Prompt:
        return self.rng.choices(range(10, self.vocab_size), k=num)

    def generate(self, prompts: list[Prompt], num_out: int) -> tuple[float, int, list[Prompt]]:
        """Seconds, prompt tokens that came from the cache, and the answers."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = self.params(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return seconds, cached, [list(output.outputs[0].token_ids) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="milepost", help="package with LLM and SamplingParams")
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--cache", choices=("on", "off"), default="on")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES)
    parser.add_argument("--answer", type=int, default=ANSWER)
    rows.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-engine.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option)
    bench, startup_s = _open(arguments, options)
    common = {
        **rows.provenance(),
        "engine": arguments.engine,
        "model": Path(arguments.model).name,
        "cache": arguments.cache,
        "options": options,
        "seed": arguments.seed,
        "answer": arguments.answer,
    }
    found = []
    for row in _run(bench, arguments.only, startup_s):
        print(json.dumps(row), flush=True)
        found.append(common | row)
    rows.write(arguments.out, found)
    return 0


def _open(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[Bench, float]:
    """The engine, and how many seconds it took to start, imports included."""
    start = time.perf_counter()
    engine = importlib.import_module(arguments.engine)
    llm = engine.LLM(
        arguments.model,
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 40960,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": arguments.cache == "on",
            "seed": arguments.seed,
            **options,
        },
    )
    startup_s = time.perf_counter() - start
    config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
    rng = random.Random(arguments.seed)
    sizes = config["vocab_size"], rng, arguments.sequences, arguments.answer
    return Bench(llm, engine.SamplingParams, *sizes), startup_s


def _run(bench: Bench, names: list[str], startup_s: float) -> Iterator[Row]:
    yield {"workload": "startup", "seconds": startup_s}
    bench.generate([bench.tokens(100), bench.tokens(3000)], 8)
    for name in names:
        bench.llm.reset_prefix_cache()
        for row in WORKLOADS[name](bench):
            yield {"workload": name, **row}


# --- workloads ------------------------------------------------------------------------------------


def repeat(bench: Bench) -> Iterator[Row]:
    """One prompt of 31,700 tokens, again and again, one output token."""
    bench.generate([bench.tokens(31_700)], 1)
    prompt = bench.tokens(31_700)
    for turn in ("cold", "again", "again", "again"):
        seconds, cached, _ = bench.generate([prompt], 1)
        yield {"turn": turn, "seconds": seconds, "cached": cached, "prompt": len(prompt)}


def system(bench: Bench) -> Iterator[Row]:
    """A system prompt and 64 tokens of each user's own, one at a time, one output token."""
    for length in (100, 400, 1000, 1900):
        shared, num = bench.tokens(length), 18
        runs = [bench.generate([[*shared, *bench.tokens(64)]], 1) for _ in range(num)][2:]
        yield {
            "shared": length,
            "seconds": statistics.median(seconds for seconds, _, _ in runs),
            "cached": sum(cached for _, cached, _ in runs),
            "reusable": length * len(runs),
        }


def fan(bench: Bench) -> Iterator[Row]:
    """64 requests at once that share 8192 tokens and have 256 of their own, 128 out."""
    shared = bench.tokens(8192)
    bench.generate([[*shared, *bench.tokens(256)]], 1)
    for _ in range(2):
        prompts = [[*shared, *bench.tokens(256)] for _ in range(64)]
        seconds, cached, _ = bench.generate(prompts, 128)
        yield {"seconds": seconds, "cached": cached, "prompt": sum(map(len, prompts))}


def chats(bench: Bench) -> Iterator[Row]:
    """8 chats of 6 turns: 1500 tokens first, 60 more each turn, 180 out."""
    histories = [bench.tokens(1500) for _ in range(8)]
    total_s, total_cached, num_prompt = 0.0, 0, 0
    for _ in range(6):
        seconds, cached, answers = bench.generate(histories, 180)
        total_s, total_cached = total_s + seconds, total_cached + cached
        num_prompt += sum(map(len, histories))
        for history, answer in zip(histories, answers, strict=True):
            history += [*answer, *bench.tokens(60)]
    yield {"seconds": total_s, "cached": total_cached, "prompt": num_prompt}


def agent(bench: Bench) -> Iterator[Row]:
    """One agent of 20 steps: 3000 tokens first, 350 more each step, 24 out."""
    history = bench.tokens(3000)
    total_s, total_cached, num_prompt = 0.0, 0, 0
    for _ in range(20):
        seconds, cached, (answer,) = bench.generate([history], 24)
        total_s, total_cached = total_s + seconds, total_cached + cached
        num_prompt += len(history)
        history += [*answer, *bench.tokens(350)]
    yield {"seconds": total_s, "cached": total_cached, "prompt": num_prompt}


def crowd(bench: Bench) -> Iterator[Row]:
    """24 agents of 6 steps, all at once: 20,000 tokens first, 500 more each step, 24 out. Their KV
    takes 11 GB on the 35B shape; `--option kv_cache_memory_bytes=2800000000` is a quarter of that.
    """
    histories = [bench.tokens(20_000) for _ in range(24)]
    for turn in range(6):
        seconds, cached, answers = bench.generate(histories, 24)
        yield {
            "turn": turn,
            "seconds": seconds,
            "cached": cached,
            "prompt": sum(map(len, histories)),
        }
        for history, answer in zip(histories, answers, strict=True):
            history += [*answer, *bench.tokens(500)]


def decode(bench: Bench) -> Iterator[Row]:
    """Tokens per second of 1, 16 and 64 sequences with prompts of 128 tokens. `--answer 96` keeps
    models short whose start takes most of a minute."""
    for num in bench.sequences:
        short, long = 32, bench.answer
        prompts = [bench.tokens(128) for _ in range(num)]
        bench.generate(prompts, short)
        # What differs between the two is decoding alone; a pause of the host in one run is none.
        base_s, whole_s = (
            statistics.median(bench.generate(prompts, length)[0] for _ in range(3))
            for length in (short, long)
        )
        rate = num * (long - short) / (whole_s - base_s)
        yield {"sequences": num, "tokens_per_s": rate, **_experts_touched(bench, prompts)}


def cold(bench: Bench) -> Iterator[Row]:
    """Prompts that nothing is known of, one output token (median of 5)."""
    for length in (512, 2048, 8192, 32_000):
        bench.generate([bench.tokens(length)], 1)
        runs = [bench.generate([bench.tokens(length)], 1)[0] for _ in range(5)]
        yield {"prompt": length, "seconds": statistics.median(runs)}


def agree(bench: Bench) -> Iterator[Row]:
    """How many of 96 greedy tokens differ after a hit from those of a cold run: 48 prompts that
    share 1,000 tokens, and 48 that share 4,000, with 20 to 314 of their own, one at a time.
    """
    for length in (1000, 4000):
        shared = bench.tokens(length)
        prompts = [[*shared, *bench.tokens(20 + 6 * number)] for number in range(50)]
        cold = []
        for prompt in prompts:
            bench.llm.reset_prefix_cache()
            cold += bench.generate([prompt], 1)[2]
        hits = [bench.generate([prompt], 1) for prompt in prompts]
        pairs = zip(cold[2:], hits[2:], strict=True)  # the first leave the state that others resume
        yield {
            "shared": length,
            "tokens": len(prompts) - 2,
            "different": sum(token != hit[2][0] for token, hit in pairs),
            "cached": sum(cached for _, cached, _ in hits),
        }


def unique(bench: Bench) -> Iterator[Row]:
    """64 requests that share nothing: 1000 in, 64 out. Compare with the cache off."""
    for _ in range(3):
        prompts = [bench.tokens(1000) for _ in range(64)]
        seconds, cached, _ = bench.generate(prompts, 64)
        yield {"seconds": seconds, "cached": cached, "prompt": 64_000}


def _experts_touched(bench: Bench, prompts: list[Prompt]) -> Row:
    """How many experts a layer a decode step of these prompts really reads, the shared one apart,
    and how many of the sequences' tokens differ; of our own engine alone.
    """
    if type(bench.llm).__module__.partition(".")[0] != "milepost":
        return {}
    engine = bench.llm.llm_engine
    if engine.config.tensor_parallel_size > 1 or not hasattr(engine.runner.executor, "_graphs"):
        return {}  # other ranks would go on with their graphs; a CPU has none
    from milepost.kernels import products
    from milepost.layers.moe import MoE
    from milepost.runner.graphs import Graphs

    executor = bench.llm.llm_engine.runner.executor
    counts: list[int] = []  # of the steps with all of them
    route, graphs = products.route, executor._graphs

    def note(*arguments: Any, **options: Any) -> Any:
        weights, experts = route(*arguments, **options)
        if len(experts) >= len(prompts):
            counts.append(int(experts.unique().numel()) - options.get("num_shared", 0))
        return weights, experts

    products.route, executor._graphs = note, Graphs()
    try:
        _, _, answers = bench.generate(prompts, 64)
    finally:
        products.route, executor._graphs = route, graphs
    last = {"distinct_tokens": len({answer[-1] for answer in answers})}
    parts = [part for layer in executor.model.layers for b in layer.blocks for part in b.parts]
    num_layers = sum(isinstance(part, MoE) for part in parts)
    return last | ({"experts_touched": statistics.mean(counts[-num_layers:])} if counts else {})


WORKLOADS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    workload.__name__: workload
    for workload in (repeat, system, fan, chats, agent, crowd, decode, cold, agree, unique)
}


if __name__ == "__main__":
    sys.exit(main())
