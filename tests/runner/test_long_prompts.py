"""What the host does for a prompt grows with its length, up to a million tokens: planning, hashing,
page tables and the arrays that are sent. Counted, not timed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

from tests.fakes import make_request, outcome
from tests.runner.test_arrays import GEOMETRY

from milepost.cache import Cache
from milepost.runner.arrays import build
from milepost.runner.graphs import exact_capacity
from milepost.runner.staging import num_staged_bytes
from milepost.runner.tables import HostTables
from milepost.scheduler.scheduler import Scheduler

BUDGET, PAGE = 8192, GEOMETRY.page_size
LENGTHS = (125_000, 250_000, 500_000, 1_000_000)


@dataclass(kw_only=True)
class Work:
    """Of all steps of a prompt."""

    num_calls: int = 0
    num_bytes: int = 0
    """Sent to the device, of arrays and of page tables."""
    most_bytes: int = 0
    """Of one step's arrays."""


def work_of(prompt: range, scheduler: Scheduler, tables: HostTables) -> Work:
    work = Work()

    def count(_frame: object, event: str, _argument: object) -> None:
        work.num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        request = make_request(scheduler.cache, str(id(work)), prompt, max_tokens=3)
        scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.schedule()
            entries = sum(each.nbytes for each in tables.update(plan))
            step = build(plan, tables, GEOMETRY, exact_capacity(plan))
            work.num_bytes += num_staged_bytes(step) + entries
            work.most_bytes = max(work.most_bytes, num_staged_bytes(step))
            scheduler.update(plan, outcome(plan))
    finally:
        sys.setprofile(None)
    return work


def test_work_grows_with_the_length_and_no_faster() -> None:
    cold, again = [], []
    for length in LENGTHS:
        cache = Cache(num_pages=length // PAGE + 200, num_slots=300, page_size=PAGE)
        scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=BUDGET)
        tables = HostTables(4, length // PAGE + 8, PAGE)
        cold.append(work_of(range(length), scheduler, tables))
        again.append(work_of(range(length), scheduler, tables))
    for fewer, more in itertools.pairwise(cold):
        assert more.num_calls < 2.2 * fewer.num_calls
        assert more.num_bytes < 2.2 * fewer.num_bytes
    # No step's arrays are larger for what came before; page tables are sent as they grow.
    most = [work.most_bytes for work in cold]
    assert most[-1] < 1.05 * most[0]
    # A hit reads its prompt once: a call or two for each page, and one table.
    for length, work in zip(LENGTHS, again, strict=True):
        assert work.num_calls < 12 * length // PAGE + 10_000
        assert work.num_bytes < 16 * length // PAGE + 100_000
