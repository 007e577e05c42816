"""Which operations compute other bits after a cache hit than in a cold run.

    python bench/behind_hits.py [--model bench/models/hybrid-35b-a3b] [--layers 8]
        [--prompt 2000] [--own 20 60 150 500] [--option 'quantization="fp8"'] [--out FILE]

A prompt is computed cold, then again after a hit of its own states, which leaves its last --own
tokens (and what precedes them back to the place where a state is kept). In the second run each
operation gets the bits that its inputs had in the first: its result is compared and replaced. So
each row of JSON shows what one operation alone rounds differently: the number of its calls in a
step, of those with any difference, and the share of rows that differ. `bench/engine.py --only
agree` counts tokens. Dummy weights, steps without graphs, one prompt at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import rows
import torch
from launches import shortened
from torch import Tensor

from milepost import LLM, SamplingParams
from milepost.kernels import attention, norm, products, recurrent
from milepost.kernels.layout.emit import Activations
from milepost.runner.graphs import Graphs

Row = dict[str, Any]
Results = list[Tensor]
_OPERATIONS = (
    (products, "multiply"),
    (products, "mix"),
    (products, "gate"),
    (products, "route"),
    (norm, "add_norm"),
    (attention, "prepare"),
    (attention, "attend"),
    (recurrent, "mix"),
)
_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--layers", type=int, default=8, help="of the model's, the first; 0: all")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens before the last --own")
    parser.add_argument("--own", type=int, nargs="+", default=[20, 60, 150, 500])
    rows.add_option(parser)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "behind-hits.jsonl")
    arguments = parser.parse_args()
    options = dict(arguments.option)
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 40960,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 8,
        **options,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = shortened(Path(arguments.model), arguments.layers, Path(folder))
        llm = LLM(str(model), **settings)
    common = {**rows.provenance(), "model": Path(arguments.model).name, "options": options}
    found: list[Row] = []
    with mock.patch.object(Graphs, "find", return_value=None):
        for own in arguments.own:
            for row in survey(llm, arguments.prompt, own):
                print(json.dumps(row), flush=True)
                found.append(common | row)
    rows.write(arguments.out, found)
    return 0


def survey(llm: LLM, before: int, own: int) -> Iterator[Row]:
    """Yields a row for each kind of operation, those that differ most first."""
    vocab, rng = llm.llm_engine.limits.vocab_size, random.Random(own)
    llm.reset_prefix_cache()
    prompt = rng.choices(range(10, vocab), k=before)
    # Leaves a state where the prompt of this survey will depart from it, as others would.
    _ask(llm, [*prompt, *rng.choices(range(10, vocab), k=own)], marks=[before])
    prompt += rng.choices(range(10, vocab), k=own)
    cold: list[Results] = []
    with _watched(lambda _, results: cold.append([each.clone() for each in results])):
        _ask(llm, prompt, salt="cold")
    calls = iter(cold)
    seen: dict[str, list[float]] = defaultdict(list)

    def compare(name: str, results: Results) -> None:
        for ours, theirs in zip(results, next(calls), strict=False):
            last = theirs[-len(ours) :]
            if last.shape != ours.shape:
                seen[f"{name}, in other parts"].append(_share(_whole(ours), _whole(last)))
                continue
            seen[name].append(_share(ours, last))
            ours.copy_(last)

    with _watched(compare):
        cached = _ask(llm, prompt)
    counts = {"prompt": len(prompt), "computed": len(prompt) - cached}
    for name, shares in sorted(seen.items(), key=lambda each: -sum(each[1])):
        different = sum(share > 0 for share in shares)
        share = round(sum(shares) / len(shares), 4)
        yield {**counts, "operation": name, "calls": len(shares), "different": different} | {
            "rows_different": share
        }


def _ask(llm: LLM, prompt: list[int], salt: str = "kept", marks: list[int] | None = None) -> int:
    """Answers the prompt; returns the number of tokens that came from the cache."""
    given = {"prompt_token_ids": prompt, "cache_salt": salt, "cache_marks": marks or []}
    (output,) = llm.generate([given], _PARAMS, use_tqdm=False)
    return int(output.num_cached_tokens or 0)


@contextmanager
def _watched(note: Callable[[str, Results], None]) -> Iterator[None]:
    """Inside, `note` gets the name and the results [T, ...] of each operation."""
    depth = 0

    def watch(module: Any, name: str) -> Any:
        operation = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            output = operation(*arguments, **options)
            depth -= 1
            if not depth:  # a product that gates is one operation
                results = list(_results(output))
                note(
                    f"{module.__name__.split('.')[-1]}.{name} {list(results[0].shape[1:])}", results
                )
            return output

        return mock.patch.object(module, name, watched)

    with ExitStack() as stack:
        for module, name in _OPERATIONS:
            stack.enter_context(watch(module, name))
        yield


def _results(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of an output, rows first; rows of FP8 as the bytes that they are."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Activations):
        if output.fp8 is not None:
            values, scales = output.fp8.filled
            yield from (values.view(torch.uint8), scales.t())
        elif output.values is not None:
            yield output.values
    else:
        for each in output:
            yield from _results(each)


def _whole(partials: Tensor) -> Tensor:
    return partials if partials.dim() == 2 else partials.float().sum(1).bfloat16()


def _share(ours: Tensor, theirs: Tensor) -> float:
    """The share of rows that differ."""
    differs = (ours != theirs).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
    return float(differs.float().mean())


if __name__ == "__main__":
    sys.exit(main())
