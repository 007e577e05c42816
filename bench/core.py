"""The cache core's own cost per page of a 100,000-token prompt, in an empty and in a full cache.

    python bench/core.py

Writes JSON rows; the ratio of the two is what counts (within one run, on one machine).
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable

from milepost.cache import Cache, Kind, Lease

PAGE_SIZE = 64
PROMPT_TOKENS = 100_000
PAGES = PROMPT_TOKENS // PAGE_SIZE


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> array[int]:
    return array("I", random.Random(seed).choices(range(150_000), k=num_tokens))


def run(cache: Cache, tokens: array[int]) -> dict[str, float]:
    """Serve one prompt in chunks of 8192; seconds by verb."""
    spent: dict[str, float] = {}

    def timed(verb: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        spent[verb] = spent.get(verb, 0.0) + time.perf_counter() - start
        return result

    chain = timed("chain", lambda: cache.chain(tokens))
    timed("digests", chain.full_digests)
    match = timed("match", lambda: cache.match(chain))
    lease = timed("admit", lambda: cache.admit(chain, match))
    assert isinstance(lease, Lease)
    while lease.position < len(chain):
        end = min(lease.position + 8192, len(chain))
        exports = timed("exports", lambda end=end: cache.take_exports(lease, end))
        written = {lease.slot_out: end} | {e.slot: e.position for e in exports}
        timed("commit", lambda end=end, written=written: cache.commit(lease, end, written))
    timed("release", lambda: cache.release(lease, Kind.ANSWER_END))
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


def main() -> None:
    for warm in (False, True):
        for num_cached in (1_000, 100_000):
            row = measure(num_cached, warm=warm)
            shown = "  ".join(f"{verb} {value:.2f}" for verb, value in row.items())
            print(f"{'hit ' if warm else 'cold'} {num_cached:>7} cached pages: us/page {shown}")


if __name__ == "__main__":
    main()
