"""What the host does for a long prompt that hits, from the token ids to the step's arrays.

    python bench/host.py [--tokens 31700] [--repeats 30]

No model and no GPU: what a GPU waits for before the first launch, and what follows behind the last.
Milliseconds, medians; one JSON row.
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
from typing import TypeVar

import rows
import torch

from milepost.cache import Cache
from milepost.engine.prompts import check_prompt, read_prompt
from milepost.kernels.attention import AttentionOperation
from milepost.kernels.device import Chip
from milepost.kernels.gated_delta import GatedDeltaOperation
from milepost.runner import arrays
from milepost.runner.graphs import exact_capacity
from milepost.runner.tables import HostTables
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.loop import outcome

VOCAB_SIZE = 151_936
GEOMETRY = arrays.Geometry(
    operations=(
        AttentionOperation(num_heads=16, num_kv_heads=2, head_dim=256),
        GatedDeltaOperation(conv_width=4, num_key_heads=16, num_value_heads=32),
    ),
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

T = TypeVar("T")


class Host:
    """A scheduler over a cache; `spent` are seconds by part."""

    def __init__(self, num_tokens: int) -> None:
        num_pages = -(-num_tokens // GEOMETRY.page_size)
        self.cache = Cache(num_pages=8 * num_pages, num_slots=64)
        self.scheduler = Scheduler(self.cache, max_num_seqs=64, max_num_batched_tokens=8192)
        self.tables = HostTables(64, num_pages + 1, GEOMETRY.page_size)
        self.spent: dict[str, list[float]] = defaultdict(list)
        self._num_asked = 0

    def ask(self, token_ids: list[int]) -> int:
        """One request of one output token; returns how many tokens were reused."""
        timed, self._num_asked = self._timed, self._num_asked + 1
        prompt = timed("read", lambda: read_prompt({"prompt_token_ids": token_ids}, None))
        limits = {"vocab_size": VOCAB_SIZE, "max_model_len": 1 << 20, "max_cache_marks": 8}
        timed("check", lambda: check_prompt(prompt, **limits))
        chain = timed("queue", lambda: self.cache.chain(prompt.packed[:]))
        request = Request(id=str(self._num_asked), chain=chain, max_tokens=1)
        timed("queue", lambda: self.scheduler.add(request))
        while self.scheduler.has_work:
            plan = timed("schedule", self.scheduler.schedule)
            timed("arrays", lambda plan=plan: self.tables.update(plan))
            capacity = exact_capacity(plan)
            timed(
                "arrays",
                lambda p=plan, c=capacity: arrays.build(p, self.tables, GEOMETRY, c),
            )
            timed("update", lambda p=plan: self.scheduler.update(p, outcome(p)))
        assert request.report is not None
        return request.report.reused

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = work()
        self.spent[part].append(time.perf_counter() - start)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=31_700)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    rng, host = random.Random(0), Host(arguments.tokens)
    by_part: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.repeats):
        token_ids = rng.choices(range(10, VOCAB_SIZE), k=arguments.tokens)
        host.ask(token_ids)
        host.spent.clear()
        reused = host.ask(token_ids)
        for part, seconds in host.spent.items():
            by_part[part].append(sum(seconds))
    medians = {part: 1e3 * statistics.median(found) for part, found in by_part.items()}
    row = {"tokens": arguments.tokens, "reused": reused, "total_ms": sum(medians.values())}
    print(json.dumps(rows.provenance() | row | medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
