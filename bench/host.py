"""What the host does for a prompt, cold and again, from the token ids to the step's arrays.

    python bench/host.py [--tokens 512 2048 8192 31700] [--repeats 30]

No model and no GPU. What the device waits for before its first kernel is `before_ms`: to read,
check, queue and schedule the prompt, to lay out what the first layers read, and to send it. Beside
those layers runs `rest`, beside the step `prepare`, and `update` behind it. Lengths vary by a few
tokens, as those of prompts do. Milliseconds, medians, of all steps of a prompt together; a JSON row
for each length, cold and again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import rows
import torch

from milepost.cache import Cache
from milepost.engine.prompts import read_prompt
from milepost.engine.validation import Limits, validate
from milepost.kernels.attention import AttentionOperation
from milepost.kernels.platform.device import Chip
from milepost.kernels.recurrent import MixerSizes, RecurrentOperation, RecurrentRule
from milepost.runner import arrays
from milepost.runner.graphs import exact_capacity, ladder, largest_step, smallest
from milepost.runner.staging import Staging, num_staged_bytes
from milepost.runner.tables import PageTables
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.fleet import outcome

VOCAB_SIZE = 151_936
PARAMS = SamplingParams(max_tokens=1)
LIMITS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
ATTENTION = AttentionOperation(num_heads=16, num_kv_heads=2, head_dim=256)
MIXER = MixerSizes(rule=RecurrentRule.GATED_DELTA, units=16, group=2, shared=128, own=128, taps=4)
FIRST = (RecurrentOperation(sizes=MIXER),)
SECOND = (ATTENTION, replace(ATTENTION, last_tokens_only=True))
"""What the layers before the first attention read, and what those behind do."""
GEOMETRY = arrays.Geometry(
    operations=FIRST + SECOND,
    page_size=64,
    page_rows=64 * 2 * 10,
    device=torch.device("cpu"),
    chip=Chip(
        arch="sm_90",
        capability=(9, 0),
        is_amd=False,
        num_sms=132,
        shared_bytes=227 << 10,
    ),
)
"""Of the 35B-A3B shape on an H200."""
CAPTURED = tuple(ladder(**LIMITS, most_launched=3072))
BEFORE = ("read", "check", "queue", "schedule", "arrays", "send")
FEWER = 50
"""Tokens by which lengths vary."""

T = TypeVar("T")


class Host:
    """A scheduler over a cache; `spent` are seconds by part."""

    def __init__(self, num_tokens: int) -> None:
        num_pages = -(-num_tokens // GEOMETRY.page_size)
        self.cache = Cache(num_pages=8 * num_pages, num_slots=64)
        self.scheduler = Scheduler(self.cache, **LIMITS)
        self.tables = PageTables(64, num_pages + 1, GEOMETRY.page_size, GEOMETRY.device)
        capacity = largest_step(**LIMITS)
        largest = arrays.build(StepPlan(sequences=()), self.tables.host, GEOMETRY, capacity)
        self.first, self.second = (
            Staging(GEOMETRY.device, num_staged_bytes(largest)) for _ in range(2)
        )
        self.spent: dict[str, list[float]] = defaultdict(list)
        self._num_asked = 0

    def ask(self, token_ids: list[int]) -> int:
        """One request of one output token; returns how many tokens were reused."""
        timed, self._num_asked = self._timed, self._num_asked + 1
        prompt = timed("read", lambda: read_prompt({"prompt_token_ids": token_ids}, None))
        limits = Limits(
            vocab_size=VOCAB_SIZE,
            max_model_len=1 << 20,
            max_cache_marks=8,
            has_tokenizer=False,
            closes_reasoning=False,
        )
        timed("check", lambda: validate(prompt, PARAMS, limits))
        chain = timed("queue", lambda: self.cache.chain(prompt.packed))
        request = Request(id=str(self._num_asked), chain=chain, max_tokens=1)
        timed("queue", lambda: self.scheduler.add(request))
        while self.scheduler.has_work:
            plan = timed("schedule", self.scheduler.schedule)
            self._launch(plan)
            timed("prepare", partial(self.scheduler.prepare, plan))
            timed("update", partial(self._update, plan))
        assert request.report is not None
        return request.report.reused

    def _launch(self, plan: StepPlan) -> None:
        """All but the kernels."""

        def build() -> tuple[Any, ...]:
            exact = exact_capacity(plan)
            new_pages = self.tables.host.follow(plan)
            capacity = smallest(CAPTURED, exact) or exact
            step, batch = arrays.begin(plan, self.tables.host, GEOMETRY, capacity)
            return replace(step, layouts=arrays.lay_out(batch, FIRST)), batch, new_pages

        def send() -> None:
            self.first.send(step)
            self.first.views(step)

        def send_rest() -> None:
            self.tables.send(new_pages)
            rest = arrays.lay_out(batch, SECOND)
            self.second.send(rest)
            self.second.views(rest)

        step, batch, new_pages = self._timed("arrays", build)
        self._timed("send", send)
        self._timed("rest", send_rest)

    def _update(self, plan: StepPlan) -> None:
        self.scheduler.update(plan, outcome(plan))

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = work()
        self.spent[part].append(time.perf_counter() - start)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 31_700])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # with a GPU no copy waits for other threads
    common = rows.provenance()
    for num_tokens in arguments.tokens:
        for row in measure(num_tokens, arguments.repeats):
            print(json.dumps(common | row), flush=True)
    return 0


def measure(num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Of prompts of so many tokens, cold and again."""
    rng, host = random.Random(0), Host(num_tokens)
    spent: dict[str, dict[str, list[float]]] = {
        turn: defaultdict(list) for turn in ("cold", "again")
    }
    reused = dict.fromkeys(spent, 0)
    for _ in range(repeats):
        length = num_tokens - rng.randrange(FEWER)
        token_ids = rng.choices(range(10, VOCAB_SIZE), k=length)
        for turn, by_part in spent.items():
            host.spent.clear()
            reused[turn] = host.ask(token_ids)
            for part, seconds in host.spent.items():
                by_part[part].append(sum(seconds))
    found = []
    for turn, by_part in spent.items():
        medians = {part: 1e3 * statistics.median(parts) for part, parts in by_part.items()}
        before = sum(medians[part] for part in BEFORE)
        row = {"tokens": num_tokens, "turn": turn, "reused": reused[turn], "before_ms": before}
        found.append(row | medians)
    return found


if __name__ == "__main__":
    sys.exit(main())
