"""What each special kernel earns in whole models: steps with all kernels, and with one taken away.

    python bench/price.py [--model bench/models/hybrid-35b-a3b] [--option 'quantization="fp8"']
        [--only NAME ...] [--without ROW ...] [--seconds 200] [--out FILE]

One engine with dummy weights. For each kernel the graphs of a decode of 1, 16 and 64 sequences and
of short prompts are captured again without it; then both are timed in turn, and prompts of 512 to
32,000 tokens too. A row for each kernel and step: milliseconds with it and without, and the median
ratio of the pairs (1.03: without it the step takes 3 % longer). Rows that a kernel cannot change
are left out. What is not measured after --seconds is named at the end. `--without` takes away any
row of the tables, by its name or its module: a new kernel needs no entry here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import rows
import torch
from triton.runtime.jit import JITFunction

from milepost import LLM, SamplingParams
from milepost.engine.assembly import fitting
from milepost.kernels import products, recurrent
from milepost.kernels.attention import ATTENTION
from milepost.kernels.layout import emit
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform import device
from milepost.kernels.platform.tables import KernelTable
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.forms.quantised import Fp8, Int4
from milepost.kernels.products.table import PRODUCTS
from milepost.runner import graphs as runner_graphs
from milepost.runner.graphs import Graphs, largest_step

Row = dict[str, Any]
DECODES = {1: 40, 16: 15, 64: 10}
"""Sequences, and replays of a step at a time."""
PROMPTS = {512: 6, 2048: 6, 8192: 4, 32_000: 2}
"""Tokens, and pairs."""
ROUNDS = 5
ONE, FEW, MANY = (1,), (16, 64), tuple(PROMPTS)
FORMS = "raw", "fp8", "int4"
TABLES: tuple[KernelTable[Any], ...] = (PRODUCTS, EXPERTS, ATTENTION, *recurrent.TABLES.values())
_LAUNCH = JITFunction.run


def _never(*_arguments: Any, **_named: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What is taken away, and where that can be seen."""

    forms: tuple[str, ...]
    steps: tuple[int, ...]
    without: Callable[[], AbstractContextManager[Any]]
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Taken away from both."""


def _put(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


@contextmanager
def _no_hopper() -> Iterator[None]:
    # An executor keeps to what it was made with, so nothing else is asked than Triton's version.
    with mock.patch.object(device, "_GLUON_TRITONS", ((99, 0), (99, 0))):
        yield


@contextmanager
def _no_beside() -> Iterator[None]:
    kernels = [
        replace(each, epilogues=tuple(set(each.epilogues) - {products.Epilogue.BESIDE}))
        for each in PRODUCTS.kernels
    ]
    try:
        with mock.patch.object(PRODUCTS, "kernels", kernels):
            PRODUCTS.forget()
            yield
    finally:
        PRODUCTS.forget()


def _without(*modules: str) -> Callable[[], AbstractContextManager[Any]]:
    """Leaves out the rows of the tables with these modules."""

    @contextmanager
    def without() -> Iterator[None]:
        before = sum(len(table.kernels) for table in TABLES)
        with ExitStack() as stack:
            for table in TABLES:
                stack.enter_context(table.without(*modules))
            assert sum(len(table.kernels) for table in TABLES) < before, modules
            yield

    return without


@contextmanager
def _ordinary_launches() -> Iterator[None]:
    launch = JITFunction.run

    def ordinary(kernel: Any, *arguments: Any, **options: Any) -> Any:
        return launch(kernel, *arguments, **options)

    with mock.patch.object(JITFunction, "run", ordinary):
        yield


_ROW, _RING = "products.hopper.gemv", "products.hopper.gemv_ring"
_NIBBLES = "products.hopper.int4_row"
KERNELS: dict[str, Kernel] = {
    "begun": Kernel(forms=FORMS, steps=ONE, without=_without("norm.triton")),
    "row_experts": Kernel(
        forms=("fp8", "int4"), steps=ONE, without=lambda: EXPERTS.without(_ROW, _NIBBLES)
    ),
    "hopper_row": Kernel(
        forms=("fp8", "int4"), steps=ONE, without=lambda: PRODUCTS.without(_ROW, _RING, _NIBBLES)
    ),
    "ring": Kernel(forms=("fp8",), steps=ONE, without=_without(_RING)),
    "linear_hopper": Kernel(
        forms=FORMS, steps=FEW, without=_without("products.hopper.raw_small_m")
    ),
    "beside": Kernel(forms=("fp8",), steps=FEW, without=_no_beside),
    "hopper_rows": Kernel(
        forms=("fp8",), steps=FEW, without=_without("products.hopper.fp8_small_m")
    ),
    "nibble_rows": Kernel(
        forms=("int4",), steps=FEW, without=_without("products.hopper.int4_small_m")
    ),
    "hopper_experts": Kernel(
        forms=("fp8",), steps=FEW, without=_without("products.hopper.fp8_experts")
    ),
    "nibble_experts": Kernel(
        forms=("int4",), steps=FEW, without=_without("products.hopper.int4_experts")
    ),
    "nibbles_tall": Kernel(
        forms=("int4",),
        steps=FEW + MANY,
        without=_without("products.hopper.int4_grouped"),
    ),
    "tall_hopper": Kernel(
        forms=("fp8",), steps=MANY, without=_without("products.hopper.fp8_grouped")
    ),
    "tall": Kernel(
        forms=("fp8",),
        steps=MANY,
        without=_without("products.portable.grouped_large"),
        beside=_no_hopper,
    ),
    "rounded": Kernel(
        forms=("fp8",), steps=FEW + MANY, without=_put(emit, "reads_rounded", _never)
    ),
    "round_gated": Kernel(
        forms=("fp8",), steps=FEW + MANY, without=_put(products, "rounds_gated", _never)
    ),
    "raw_tall": Kernel(
        forms=("raw",), steps=MANY, without=_without("products.portable.grouped_large")
    ),
    "delta_decode": Kernel(
        forms=FORMS, steps=ONE + FEW, without=_without("recurrent.hopper.delta_decode")
    ),
    "delta_states": Kernel(forms=FORMS, steps=MANY, without=_without("recurrent.hopper.chunk_h")),
    "group_few": Kernel(
        forms=FORMS,
        steps=(*FEW, 512),
        without=lambda: mock.patch("milepost.kernels.products.grouping.MANY_ROUTED", 0),
    ),
    "attention_wide": Kernel(forms=FORMS, steps=MANY, without=_without("attention.hopper.wide")),
    "quick": Kernel(forms=FORMS, steps=MANY, without=_ordinary_launches),
    "hopper": Kernel(forms=FORMS, steps=(*ONE, *FEW, *MANY), without=_no_hopper),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(rows.ROOT / "bench/models/hybrid-35b-a3b"))
    parser.add_argument("--only", nargs="*", choices=KERNELS)
    parser.add_argument("--without", nargs="*", default=[], help="rows of the tables")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after these")
    rows.add_option(parser)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "price.jsonl")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    options = dict(arguments.option)
    with mock.patch.object(fitting, "ladder", _short_ladder):
        llm = LLM(
            arguments.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=40960,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            **options,
        )
    print(f"started in {time.perf_counter() - begun:.0f} s", flush=True)
    price = Price(llm)
    common = {**rows.provenance(), "model": Path(arguments.model).name, "options": options}
    found: list[Row] = []
    steps = (*ONE, *FEW, *MANY)
    rest = {
        name: Kernel(forms=FORMS, steps=steps, without=_without(name)) for name in arguments.without
    }
    kernels, names = KERNELS | rest, [*rest, *(arguments.only or ([] if rest else KERNELS))]
    left = [name for name in names if price.form in kernels[name].forms]
    while left and time.perf_counter() - begun < arguments.seconds:
        name = left.pop(0)
        for row in price.of(name, kernels[name]):
            print(json.dumps(row), flush=True)
            found.append(common | row)
    rows.write(arguments.out, found)
    print(f"took {time.perf_counter() - begun:.0f} s; not measured:", *(left or ["none"]))
    return 0


def _short_ladder(**limits: Any) -> list[Capacity]:
    """The graphs that the measured steps use, and no others."""
    return [
        each
        for each in runner_graphs.ladder(**limits)
        if (each.num_tokens in DECODES if each.decodes else each.num_tokens >= min(PROMPTS))
    ]


class Price:
    """An engine, whose graphs change places with others."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._rng = llm, random.Random(0)
        executor: Any = llm.llm_engine.runner.executor
        self._executor = executor
        self._whole: Graphs = self._executor._graphs
        forms = {type(getattr(each, "form", None)) for each in self._executor.model.modules()}
        self.form = "fp8" if Fp8 in forms else "int4" if Int4 in forms else "raw"
        for num in DECODES:
            self._fill(num)
        for length in PROMPTS:
            self._ask(length)

    def of(self, name: str, kernel: Kernel) -> Iterator[Row]:
        begun = time.perf_counter()
        with kernel.beside():
            base = self._whole if kernel.beside is nullcontext else self._captured(kernel.steps)
            with kernel.without():
                others = self._captured(kernel.steps)
            spent = time.perf_counter() - begun
            for step in kernel.steps:
                pairs = self._decode if step in DECODES else self._prompt
                with_it, without = pairs(step, base, others, kernel)
                yield {
                    "kernel": name,
                    "form": self.form,
                    "step": f"{'decode' if step in DECODES else 'cold'} {step}",
                    "with_ms": round(1e3 * statistics.median(with_it), 3),
                    "without_ms": round(1e3 * statistics.median(without), 3),
                    "ratio": round(rows.paired_ratio(without, with_it), 4),
                    "capture_s": round(spent, 1),
                }

    def _captured(self, steps: tuple[int, ...]) -> Graphs:
        """The graphs of these steps, captured as kernels are chosen now."""
        graphs = Graphs()
        graphs._last = self._whole._last
        sizes = [each for each in self._whole._graphs if self._is_used(each, steps)]
        self._executor._graphs = graphs
        largest = largest_step(max_num_seqs=64, max_num_batched_tokens=8192)
        if JITFunction.run is _LAUNCH:  # or launches are what is taken away
            self._executor.compile([*([largest] if MANY[0] in steps else []), *sizes])
        try:
            self._executor.capture(sizes)
        finally:
            self._executor._graphs = self._whole
        return graphs

    def _is_used(self, capacity: Capacity, steps: tuple[int, ...]) -> bool:
        if capacity.decodes:
            return capacity.num_tokens in steps
        return any(step in PROMPTS for step in steps)

    def _decode(
        self,
        num: int,
        base: Graphs,
        others: Graphs,
        kernel: Kernel,  # noqa: ARG002
    ) -> tuple[list[float], list[float]]:
        """Seconds of a step, by replays of the last one of a real answer."""
        self._fill(num)
        capacity = next(c for c in self._whole._graphs if c.decodes and c.num_tokens == num)
        spent: tuple[list[float], list[float]] = ([], [])
        for index in range(ROUNDS + 1):
            for way in (0, 1) if index % 2 else (1, 0):
                graphs = (base, others)[way]
                graphs.replay(capacity)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(DECODES[num]):
                    graphs.replay(capacity)
                end.record()
                torch.cuda.synchronize()
                spent[way].append(1e-3 * start.elapsed_time(end) / DECODES[num])
        return spent[0][1:], spent[1][1:]

    def _prompt(
        self, length: int, base: Graphs, others: Graphs, kernel: Kernel
    ) -> tuple[list[float], list[float]]:
        """Seconds from a cold prompt to its first token."""
        spent: tuple[list[float], list[float]] = ([], [])
        for index in range(PROMPTS[length] + 1):
            for way in (0, 1) if index % 2 else (1, 0):
                self._executor._graphs = (base, others)[way]
                with ExitStack() as stack:
                    if way:
                        stack.enter_context(kernel.without())
                    spent[way].append(self._ask(length))
                self._executor._graphs = self._whole
        return spent[0][1:], spent[1][1:]

    def _fill(self, num: int) -> None:
        """Have so many sequences decode, so that the step's inputs are theirs."""
        self._generate([self._tokens(128) for _ in range(num)], 8)

    def _ask(self, length: int) -> float:
        return self._generate([self._tokens(length)], 1)

    def _generate(self, prompts: list[list[int]], num_out: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self._llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begun

    def _tokens(self, num: int) -> list[int]:
        return self._rng.choices(range(10, self._llm.llm_engine.limits.vocab_size), k=num)


if __name__ == "__main__":
    sys.exit(main())
