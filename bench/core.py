"""The cache core's own cost per page of a 100,000-token prompt, in an empty and in a full cache.

And what the scheduler takes to plan a step while 10,000 requests wait.

    python bench/core.py

Seconds are those of this process, whatever else the machine does, and without the collector's. The
ratio of the rows is what counts (within one run, on one machine).
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from milepost.cache import Allocation, Cache, Kind
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.fleet import outcome

PAGE_SIZE = 64
PROMPT_TOKENS = 100_000
PAGES = PROMPT_TOKENS // PAGE_SIZE

T = TypeVar("T")


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> array[int]:
    return array("I", random.Random(seed).choices(range(150_000), k=num_tokens))


def run(cache: Cache, tokens: array[int]) -> dict[str, float]:
    """Serve one prompt in chunks of 8192; seconds by verb."""
    spent: dict[str, float] = {}

    def timed(verb: str, call: Callable[[], T]) -> T:
        start = time.process_time()
        result = call()
        spent[verb] = spent.get(verb, 0.0) + time.process_time() - start
        return result

    chain = timed("chain", lambda: cache.chain(tokens))
    timed("digests", chain.full_digests)
    match = timed("match", lambda: cache.match(chain))
    allocation = timed("admit", lambda: cache.admit(chain, match))
    assert isinstance(allocation, Allocation)
    while allocation.committed < len(chain):
        end = min(allocation.committed + 8192, len(chain))
        exports = timed("exports", partial(cache.take_exports, allocation, end))
        written = {allocation.slot_out: end} | {e.slot: e.position for e in exports}
        timed("commit", partial(cache.commit, allocation, end, written))
    timed("release", lambda: cache.release(allocation, Kind.ANSWER_END))
    return spent


def fill(cache: Cache, num_pages: int) -> None:
    """Cache other prompts until `num_pages` pages are held."""
    seed = 10_000
    while cache.pages.num_cached < num_pages:
        missing = num_pages - cache.pages.num_cached
        run(cache, prompt(seed, min(PROMPT_TOKENS, missing * PAGE_SIZE)))
        seed += 1


def measure(num_cached: int, *, warm: bool, repeats: int = 21) -> dict[str, float]:
    """Microseconds per page by verb, the median of several prompts."""
    cache = Cache(num_pages=num_cached + (repeats + 1) * (PAGES + 2), num_slots=4096)
    fill(cache, num_cached)
    gc.collect()
    rows = []
    for seed in range(repeats):
        tokens = prompt(seed)
        if warm:
            run(cache, tokens)
        rows.append(run(cache, tokens))
    verbs = rows[0].keys()
    medians = {v: sorted(row[v] for row in rows)[repeats // 2] for v in verbs}
    medians["total"] = sorted(sum(row.values()) for row in rows)[repeats // 2]
    return {verb: 1e6 * seconds / PAGES for verb, seconds in medians.items()}


NUM_WAITING = 10_000
NUM_STATES = 5_000


def waiting(cache: Cache, *, num_running: int, shared: bool) -> Scheduler:
    """A scheduler that decodes `num_running` requests while many wait: for a prefix that one of
    them is computing, if it is `shared`.
    """
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=8192)

    def add(name: str, tokens: array[int], max_tokens: int) -> None:
        scheduler.add(Request(id=name, chain=cache.chain(tokens), max_tokens=max_tokens))

    for number in range(num_running):
        add(f"r{number}", prompt(20_000 + number, 500), 1000)
    while scheduler.waiting:
        step(scheduler)
    first = prompt(30_000, 64_000)
    if shared:
        add("first", first, 8)
    for number in range(NUM_WAITING):
        own = array("I", (number,))
        add(f"w{number}", first[:1920] + own if shared else prompt(40_000 + number, 1921), 8)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, int]:
    """Plan and take a step; seconds to plan it, and the requests and pages that came or went."""
    start, before = time.process_time(), num_changes(scheduler)
    plan = scheduler.schedule()
    spent, changes = time.process_time() - start, num_changes(scheduler) - before
    scheduler.update(plan, outcome(plan))
    return spent, changes


def num_changes(scheduler: Scheduler) -> int:
    """Admissions and evictions so far."""
    stats = scheduler.cache.stats
    return stats.num_evicted + stats.pages_evicted - len(scheduler.waiting)


def measure_steps(case: str, *, num_steps: int = 50) -> str:
    """Milliseconds to plan a step, with 100,000 cached pages. What a step admits and evicts costs
    as much as there is of it, so steps that do are shown apart.
    """
    num_running = {"a prefix": 32, "memory": 60, "a seat": 64}[case]
    used = num_running * -(-1500 // PAGE_SIZE)
    spare = 1200 if case == "a prefix" else used // 2
    cache = Cache(num_pages=100_000 + spare, num_slots=NUM_STATES + 70)
    pages_each = 2 * 100_000 // NUM_STATES
    for seed in range(NUM_STATES // 2):
        run(cache, prompt(10_000 + seed, pages_each * PAGE_SIZE))
    scheduler = waiting(cache, num_running=num_running, shared=case == "a prefix")
    gc.collect()
    steps = [step(scheduler) for _ in range(num_steps)]
    quiet = sorted(spent for spent, changes in steps if not changes)
    shown = f"{1e3 * quiet[len(quiet) // 2]:.2f} ms, at most {1e3 * quiet[-1]:.2f} ms"
    busy = [(spent - quiet[0], changes) for spent, changes in steps if changes]
    if busy:
        each = sum(spent for spent, _ in busy) / sum(changes for _, changes in busy)
        most = max(changes for _, changes in busy)
        shown += f"; {1e6 * each:.0f} us more for each admission and eviction, up to {most} a step"
    return shown


def main() -> None:
    gc.disable()
    for case in ("a prefix", "memory", "a seat"):
        print(f"{NUM_WAITING} wait for {case}: schedule() {measure_steps(case)}")
    for warm in (False, True):
        for num_cached in (1_000, 100_000):
            row = measure(num_cached, warm=warm)
            shown = "  ".join(f"{verb} {value:.2f}" for verb, value in row.items())
            print(f"{'hit ' if warm else 'cold'} {num_cached:>7} cached pages: us/page {shown}")


if __name__ == "__main__":
    main()
