"""What each mechanism of the cache and of admission earns: replays with one of them left out.

The table of docs/policies.md, "What earns its place":

    python bench/ablations.py FOLDER [--variants whole no-fork-counts] [--processes 32]
    python bench/ablations.py FOLDER --slots

Hit rate, p90 of the first token and the time until all is done, in virtual time, as differences
from the whole. Each row is written when it is there; a run that was stopped goes on. With `--slots`
the requests run one after the other, and slots alone are limited: that takes seconds, and shows
what eviction earns without admission.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import rows
import slots
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import Cell, run

from milepost.cache import placement
from milepost.cache.eviction import buckets, hold_back, reclaim, return_rates, score
from milepost.scheduler import admission, planner, sharing
from milepost.simulator.cost import read_cost
from milepost.simulator.trace import read_trace

SIZES = {
    "agent-dev": (48.0, 96.0, 192.0),
    "mooncake-conversation": (32.0, 128.0, 512.0),
    "mooncake-synthetic": (32.0, 128.0, 512.0),
}
"""GiB: tight, in the middle, ample."""
SLOTS = {"mooncake-conversation": (64, 256), "mooncake-synthetic": (32, 128)}
"""Slots, where they alone are limited."""
LIMITS = {"agent-dev": 700, "mooncake-conversation": 1500, "mooncake-synthetic": 1500}
COST = "hybrid-35b-a3b-h200"


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """In place of what would learn."""


def _fixed_law(rates: Any, num_returns: int, age: int) -> float:  # noqa: ARG001
    return 1.0 / (age + return_rates.AGE_OFFSET)


def _rate_now(rates: Any, num_returns: int, age: int) -> float:
    return rates._level(num_returns) * rates._at(age)[0] / (age + return_rates.AGE_OFFSET)


def _level_alone(rates: Any, num_returns: int, age: int) -> float:
    return rates._level(num_returns) / (age + return_rates.AGE_OFFSET)


def _fixed_events(rates: Any, num_returns: int, age: int, later: int) -> float:  # noqa: ARG001
    return return_rates._width(age, later)


def _level_of_events(rates: Any, num_returns: int, age: int, later: int) -> float:
    return rates._level(num_returns) * return_rates._width(age, later)


def _cuts_in_all(cuts: Any, over: int, up_to: int) -> float:
    return sum(cuts._counts) / cuts.num_continued * max(up_to - over, 0) / max(up_to, 1)


def _law(chance: Any, expected: Any) -> Callable[[], None]:
    def replace() -> None:
        return_rates.ReturnRates.chance = chance  # type: ignore[method-assign]
        return_rates.ReturnRates.expected = expected  # type: ignore[method-assign]

    return replace


def _no_levels() -> None:
    return_rates.MAX_RETURNS = score.MAX_RETURNS = 0


def _oldest_alone(bucket: Any, value: Any, by: Any) -> Any:
    oldest = bucket.checkpoints.first()
    bucket.least, bucket.until = (oldest, value(oldest)), by.clock + by.steady(oldest)
    return bucket.least


def _claim_nothing(_reclaimer: Any, reservation: Any, checkpoint: Any) -> None:
    reservation.checkpoint = checkpoint


def _lru(expected: Any, checkpoint: Any) -> float:
    return 1.0 / (expected.clock - checkpoint.end.time + return_rates.AGE_OFFSET)


def _per_page(expected: Any, checkpoint: Any, num_pages: int) -> float:  # noqa: ARG001
    return expected.of(checkpoint)


def _put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


VARIANTS: dict[str, Callable[[], None]] = {
    "whole": _nothing,
    "no-learned-rates": _law(_fixed_law, _fixed_events),
    "no-look-ahead": _put(return_rates.ReturnRates, "chance", _rate_now),
    "no-rates-by-age": _law(_level_alone, _level_of_events),
    "no-rates-by-returns": _no_levels,
    "no-cut-counts": _put(return_rates.Cuts, "observe", _nothing),
    "no-cuts-by-length": _put(return_rates.Cuts, "rate", _cuts_in_all),
    "no-fork-counts": _put(score.Score, "_fork_at", lambda *_: None),
    "no-newest-end": _put(buckets.Bucket, "look", _oldest_alone),
    "no-reservations": _put(reclaim.Reclaimer, "claim", _claim_nothing),
    "no-hold-back": _put(admission.Admission, "_may_hold_back", lambda *_: False),
    "no-growth": _put(score.Score, "growth", lambda *_: 0.0),
    "busy-or-not": _put(admission.Admission, "busy_share", property(lambda _: 1.0, _nothing)),
    "first-come": _put(admission.Admission, "_place", lambda _, request: request.rank),
    "no-short-ones-first": _put(planner.Planner, "_shortest", lambda *_: []),
    "bypassed-64": _put(admission, "MAX_BYPASSED", 64),
    "held-back-60-s": _put(admission, "MAX_HOLD_BACK_S", 60.0),
    "look-ahead-64": _put(hold_back, "LOOK_AHEAD", 64),
    "no-declining": _put(reclaim.Reclaimer, "is_worth_a_slot", lambda *_: True),
    "no-sparse-states": _put(placement, "SPARSE", 1 << 30),
    "no-bytes": _put(score.Score, "of_page", _per_page),
    "no-waits-for-prefix": _put(sharing.PendingPrefixes, "find", lambda *_: None),
    "no-parted-tails": _put(score, "_has_parted", lambda *_: False),
    "recency-alone": _put(score.Score, "of", _lru),
}

Row = dict[str, Any]
Task = tuple[str, Cell]
"""What is left out, and of which replay."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with <trace>.jsonl.gz")
    parser.add_argument("--traces", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--policies", nargs="+", default=["auto", "auto-split"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[0, 1, 2], help="0 is tight")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--slots", action="store_true", help="only limited slots, and no queue")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-ablations.jsonl")
    arguments = parser.parse_args()
    if arguments.slots:
        Console(width=200).print(_slots_table(arguments))
        return 0
    known = _read(arguments.out)
    tasks = [task for task in _tasks(arguments) if (task[0], str(task[1])) not in known]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    console = Console(stderr=True)
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        replay = functools.partial(_replay, folder=arguments.folder)
        found = pool.imap_unordered(replay, tasks, chunksize=1)
        for row in track(found, total=len(tasks), console=console, description="replays"):
            known[row["variant"], row["cell"]] = row
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    for policy in arguments.policies:
        Console(width=200).print(_table(arguments, policy, known))
    return 0


def _tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """The long ones first, so that the processes end together."""
    for trace in arguments.traces:
        for seed in arguments.seeds:
            for size in arguments.sizes:
                for policy in arguments.policies:
                    for variant in arguments.variants:
                        yield (
                            variant,
                            Cell(
                                trace=trace,
                                limit=LIMITS[trace],
                                cost=COST,
                                seed=seed,
                                gib=SIZES[trace][size],
                                policy=policy,
                            ),
                        )


def _replay(task: Task, folder: Path) -> Row:
    """In a process of its own, so that what is left out is left out there alone."""
    variant, cell = task
    VARIANTS[variant]()
    trace = read_trace(folder / f"{cell.trace}.jsonl.gz", limit=cell.limit)
    trace.link_answers()
    row = run(trace, cell, read_cost(cell.cost))
    return row | {"variant": variant, "cell": str(cell)}


def _slots_table(arguments: argparse.Namespace) -> Table:
    """Hit rate of the whole, and points of it that each mechanism earns."""
    table = Table(title="slots limited alone: hits %, then what each changes", box=None)
    cells = [(trace, num_slots) for trace in SLOTS for num_slots in SLOTS[trace]]
    for name in ("left out", *(f"{trace}, {num_slots}" for trace, num_slots in cells)):
        table.add_column(name, justify="right")
    replay = functools.partial(_hits_of_slots, folder=arguments.folder)
    context = multiprocessing.get_context("fork")
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        found = dict(zip(arguments.variants, pool.map(replay, arguments.variants, 1), strict=True))
    for variant, hits in found.items():
        changes = [f"{hit - base:+.1f}" for hit, base in zip(hits, found["whole"], strict=True)]
        table.add_row(variant, *([f"{hit:.1f}" for hit in hits] if variant == "whole" else changes))
    return table


def _hits_of_slots(variant: str, folder: Path) -> list[float]:
    VARIANTS[variant]()
    rates = []
    for name, sizes in SLOTS.items():
        trace = read_trace(folder / f"{name}.jsonl.gz", limit=LIMITS[name])
        trace.link_answers()
        for num_slots in sizes:
            stats = slots.replay(trace, num_slots).stats
            rates.append(100 * stats.hits / stats.queries)
    return rates


def _read(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    held = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["variant"], row["cell"]): row for row in held}


def _table(arguments: argparse.Namespace, policy: str, known: dict[tuple[str, str], Row]) -> Table:
    """Means of the seeds: points of hit rate, and p90 and all done as ratios to the whole's."""
    table = Table(title=f"{policy}: hits % (p90 s, all done s), then what each changes", box=None)
    columns = [
        (trace, SIZES[trace][size]) for trace in arguments.traces for size in arguments.sizes
    ]
    for name in ("left out", *(f"{trace}, {gib:g} GiB" for trace, gib in columns)):
        table.add_column(name, justify="right")
    whole = [_means(known, "whole", policy, *column) for column in columns]
    for variant in arguments.variants:
        cells = []
        for column, base in zip(columns, whole, strict=True):
            hit, p90, done = _means(known, variant, policy, *column)
            if variant == "whole":
                cells.append(f"{hit:.1f} ({p90:.1f}, {done:.0f})")
            else:
                cells.append(f"{hit - base[0]:+.1f} ({p90 / base[1]:.2f}, {done / base[2]:.2f})")
        table.add_row(variant, *cells)
    return table


def _means(
    known: dict[tuple[str, str], Row], variant: str, policy: str, trace: str, gib: float
) -> tuple[float, float, float]:
    held = [
        row
        for (name, _), row in known.items()
        if name == variant and (row["policy"], row["trace"], row["gib"]) == (policy, trace, gib)
    ]
    if not held:
        return math.nan, math.nan, math.nan
    hit, p90, done = (
        fmean(row[name] for row in held) for name in ("hit_rate", "ttft_p90_s", "virtual_s")
    )
    return 100 * hit, p90, done


if __name__ == "__main__":
    sys.exit(main())
