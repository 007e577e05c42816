"""What launching costs the host in steps that are no CUDA graph, remembered and Triton's own way;
or what such steps take beside their graphs.

    python bench/launches.py [--model bench/models/hybrid-35b-a3b] [--layers 8] [--graphs | --hits]
        [--tokens 600 2048 8192] [--option 'quantization="fp8"'] [--out FILE]

Prompts of so many tokens, each computed both ways in turn: what the host takes until all is
launched, and until the GPU is done. The hidden states of both must be equal bit by bit. A row for
each size: medians in milliseconds, and the median of the pairs' ratios. With `--graphs` prompts in
their graphs and launched one by one, from the token ids to the first token; with `--hits` 64 tokens
behind so many that are cached, in graphs of two pieces and of one. `--layers 0` are all.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import rows
import torch
from triton.runtime.jit import JITFunction

from milepost import LLM, SamplingParams
from milepost.kernels.layout.batch import Capacity
from milepost.models.decoder import Decoder
from milepost.runner.graphs import Graphs

_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--layers", type=int, default=8, help="of the model's, the first")
    parser.add_argument("--tokens", type=int, nargs="+", default=[600, 2048, 8192])
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--hits", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    rows.add_option(parser)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "launches.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(shortened(Path(arguments.model), arguments.layers, Path(folder))),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=40960,
            max_num_seqs=8,
            **options,
        )
    common = {
        **rows.provenance(),
        "model": Path(arguments.model).name,
        "layers": arguments.layers,
        "options": options,
    }
    if arguments.graphs:
        found = [_measure_graph(llm, num, arguments.repeats) for num in arguments.tokens]
    elif arguments.hits:
        found = _measure_hits(llm, arguments.tokens, arguments.repeats)
    else:
        with _measuring() as measured:
            found = [_measure(llm, num, arguments.repeats, measured) for num in arguments.tokens]
    for row in found:
        print(json.dumps(row))
    rows.write(arguments.out, [common | row for row in found])
    return 0


def shortened(model: Path, num_layers: int, folder: Path) -> Path:
    """A copy of the model's folder with its first layers alone."""
    if not num_layers:
        return model
    copy = folder / model.name
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = num_layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@contextmanager
def _measuring() -> Iterator[list[tuple[float, float, torch.Tensor]]]:
    """Inside, each step that is no graph is run twice, Triton's own way first, and adds to the
    list: seconds to launch, seconds in all, hidden states."""
    forward, launch = Decoder.forward, JITFunction.run
    measured: list[tuple[float, float, torch.Tensor]] = []

    def ordinary(kernel: Any, *args: Any, **options: Any) -> Any:
        return launch(kernel, *args, **options)

    def once(model: Decoder, *given: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        hidden = forward(model, *given)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        measured.append((launched - begun, time.perf_counter() - begun, hidden.clone()))
        return hidden

    def both(model: Decoder, *given: Any) -> torch.Tensor:
        with mock.patch.object(JITFunction, "run", ordinary):  # a launch that is replaced is heeded
            once(model, *given)
        return once(model, *given)

    with (
        mock.patch.object(Decoder, "forward", both),
        mock.patch.object(Graphs, "find", return_value=None),
    ):
        yield measured


def _measure_graph(llm: LLM, num_tokens: int, repeats: int) -> dict[str, Any]:
    rng, vocab = random.Random(num_tokens), llm.llm_engine.limits.vocab_size
    find, sizes = Graphs.find, []

    def note(graphs: Graphs, exact: Any) -> Any:
        capacity = find(graphs, exact)
        sizes.append(None if capacity is None else capacity.num_tokens)
        return capacity

    def once(**how: Any) -> float:
        prompt = {"prompt_token_ids": rng.choices(range(10, vocab), k=num_tokens)}
        with mock.patch.object(Graphs, "find", **how):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            llm.generate([prompt], _PARAMS, use_tqdm=False)
            return time.perf_counter() - begun

    pairs = [(once(new=note), once(return_value=None)) for _ in range(repeats + 2)][2:]
    graph, plain = ([pair[way] for pair in pairs] for way in (0, 1))
    return {
        "tokens": num_tokens,
        "graph": sizes[-1],
        "graph_ms": round(1e3 * statistics.median(graph), 2),
        "plain_ms": round(1e3 * statistics.median(plain), 2),
        "ratio": round(rows.paired_ratio(plain, graph), 2),
    }


def _measure_hits(llm: LLM, depths: list[int], repeats: int) -> list[dict[str, Any]]:
    executor: Any = llm.llm_engine.runner.executor
    ways = {"two": (executor._graphs, executor._pieces)}
    whole, graphs = copy.copy(executor._pieces), Graphs()
    whole.num_first, graphs._last = 0, executor._graphs._last
    small = [each for each in executor._graphs._graphs if _holds_a_hit(each)]
    executor._graphs, executor._pieces = ways["one"] = graphs, whole
    executor.capture(small)
    rng, vocab, found = random.Random(0), llm.llm_engine.limits.vocab_size, []
    for depth in depths:
        shared = rng.choices(range(10, vocab), k=depth)
        spent: dict[str, list[float]] = {"one": [], "two": []}
        for index in range(repeats + 4):  # the first leave the state that others resume from
            for way in sorted(ways, reverse=bool(index % 2)):
                executor._graphs, executor._pieces = ways[way]
                prompt = {"prompt_token_ids": [*shared, *rng.choices(range(10, vocab), k=64)]}
                torch.cuda.synchronize()
                begun = time.perf_counter()
                llm.generate([prompt], _PARAMS, use_tqdm=False)
                spent[way].append(time.perf_counter() - begun)
        one, two = (spent[way][4:] for way in ("one", "two"))
        row = {f"{way}_ms": round(1e3 * statistics.median(spent[way][4:]), 2) for way in spent}
        found.append({"cached": depth, **row, "ratio": round(rows.paired_ratio(one, two), 3)})
    executor._graphs, executor._pieces = ways["two"]
    return found


def _holds_a_hit(capacity: Capacity) -> bool:
    return not capacity.decodes and capacity.num_sequences == 4 and capacity.num_tokens <= 128


def _measure(llm: LLM, num_tokens: int, repeats: int, measured: list[Any]) -> dict[str, Any]:
    rng, vocab = random.Random(num_tokens), llm.llm_engine.limits.vocab_size
    for index in range(repeats + 2):
        if index == 2:
            measured.clear()
        prompt = {"prompt_token_ids": rng.choices(range(10, vocab), k=num_tokens)}
        llm.generate([prompt], _PARAMS, use_tqdm=False)
    ordinary, quick = measured[0::2], measured[1::2]
    assert len(ordinary) == len(quick) == repeats, "a prompt is a step, and no graph"
    equal = [torch.equal(a[2], b[2]) for a, b in zip(ordinary, quick, strict=True)]
    assert all(equal), f"hidden states differ in {equal.count(False)} of {repeats} steps"
    row: dict[str, Any] = {"tokens": num_tokens}
    for part, name in enumerate(("launched", "done")):
        ours, theirs = [run[part] for run in quick], [run[part] for run in ordinary]
        row |= {
            f"{name}_ms": round(1e3 * statistics.median(ours), 2),
            f"{name}_by_triton_ms": round(1e3 * statistics.median(theirs), 2),
            f"{name}_ratio": round(rows.paired_ratio(theirs, ours), 2),
        }
    return row


if __name__ == "__main__":
    sys.exit(main())
