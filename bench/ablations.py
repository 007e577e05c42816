"""What each mechanism of the cache and of admission earns: replays with one of them left out.

The table of docs/policies.md, "What earns its place":

    python bench/ablations.py FOLDER [--variants whole no-fork-counts] [--processes 14]
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
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import rows
import slots
import traffic
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import Cell, run

from milepost.cache import placement
from milepost.cache.eviction import buckets, reclaim, return_rates, score
from milepost.scheduler import admission, planner, sharing

CELLS = {
    "agent-dev": (350, 64.0),
    "systems": (0, 2.0),
    "mix": (0, 3.0),
    "made-agents": (0, 8.0),
    "scan": (0, 3.0),
    "mooncake-conversation": (700, 48.0),
    "mooncake-synthetic": (700, 96.0),
    "cycle": (0, 8.0),
}
"""Requests, and GiB: less than what returns needs. Those that take longest are first."""
SLOTS = {"mooncake-conversation": (64, 256), "mooncake-synthetic": (32, 128)}
"""Slots, where they alone are limited, and requests run one after the other."""
SLOTS_LIMIT = 1500
COST = "hybrid-35b-a3b-h200"


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """In place of what would learn."""


def _fixed_law(rates: Any, num_returns: int, age: int) -> float:  # noqa: ARG001
    return 1.0 / (age + return_rates.AGE_OFFSET)


def _rate_now(rates: Any, num_returns: int, age: int) -> float:
    return float(rates._level(num_returns) * rates._at(age)[0] / (age + return_rates.AGE_OFFSET))


def _level_alone(rates: Any, num_returns: int, age: int) -> float:
    return float(rates._level(num_returns) / (age + return_rates.AGE_OFFSET))


def _fixed_events(rates: Any, num_returns: int, age: int, later: int) -> float:  # noqa: ARG001
    return return_rates._width(age, later)


def _level_of_events(rates: Any, num_returns: int, age: int, later: int) -> float:
    return float(rates._level(num_returns) * return_rates._width(age, later))


def _cuts_in_all(cuts: Any, over: int, up_to: int) -> float:
    share = max(up_to - over, 0) / max(up_to, 1)
    return float(sum(cuts._counts) / cuts.num_continued * share)


def _law(chance: Any, expected: Any) -> Callable[[], None]:
    def replace() -> None:
        return_rates.ReturnRates.chance = chance  # type: ignore[method-assign]
        return_rates.ReturnRates.expected = expected  # type: ignore[method-assign]

    return replace


def _no_levels() -> None:
    for module in (return_rates, score):
        mock.patch.object(module, "MAX_RETURNS", 0).start()


def _oldest_alone(bucket: Any, value: Any, by: Any) -> Any:
    oldest = bucket.checkpoints.first()
    bucket.least, bucket.until = (oldest, value(oldest)), by.clock + by.steady(oldest)
    return bucket.least


def _claim_nothing(_reclaimer: Any, reservation: Any, checkpoint: Any) -> None:
    reservation.checkpoint = checkpoint


def _strays_alone(reclaimer: Any, unified: Any) -> bool:
    return bool(reclaimer._evict_strays(unified.pages_a_slot))


def _lru(expected: Any, checkpoint: Any) -> float:
    return float(1.0 / (expected.clock - checkpoint.end.time + return_rates.AGE_OFFSET))


def _per_page(expected: Any, checkpoint: Any, num_pages: int) -> float:  # noqa: ARG001
    return float(expected.of(checkpoint))


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
    "no-declining": _put(score.Score, "of_sparse", lambda *_: inf),
    "no-sparse-states": _put(placement, "SPARSE", 1 << 30),
    "no-evidence-of-evicted": _put(score.Score, "evicted", _nothing),
    "all-expected": _put(score.Score, "is_expected", lambda *_: True),
    "no-moves": _put(reclaim.Reclaimer, "_clear_unit", _strays_alone),
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
    parser.add_argument("--traces", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
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
    Console(width=200).print(_table(arguments, known))
    return 0


def _tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """The long ones first, so that the processes end together."""
    for name in arguments.traces:
        for seed in arguments.seeds:
            for variant in arguments.variants:
                yield variant, _cell(arguments, name, seed)


def _cell(arguments: argparse.Namespace, name: str, seed: int) -> Cell:
    limit, gib = CELLS[name]
    return Cell(trace=name, limit=limit, cost=COST, seed=seed, gib=gib, policy=arguments.policy)


def _replay(task: Task, folder: Path) -> Row:
    """In a process of its own, so that what is left out is left out there alone."""
    variant, cell = task
    VARIANTS[variant]()
    return run(folder, cell) | {"variant": variant, "cell": str(cell)}


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
        trace = traffic.read(name, folder, limit=SLOTS_LIMIT, seed=0)
        for num_slots in sizes:
            stats = slots.replay(trace, num_slots).stats
            rates.append(100 * stats.hits / stats.queries)
    return rates


def _read(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    held = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["variant"], row["cell"]): row for row in held}


def _table(arguments: argparse.Namespace, known: dict[tuple[str, str], Row]) -> Table:
    """Means of the seeds: points of hit rate, and p90 and all done as ratios to the whole's."""
    title = f"{arguments.policy}: hits % (p90 s, all done s), then what each changes"
    table = Table(title=title, box=None)
    for name in ("left out", *(f"{name}, {CELLS[name][1]:g} GiB" for name in arguments.traces)):
        table.add_column(name, justify="right")
    for variant in arguments.variants:
        row = [_difference(arguments, known, name, variant) for name in arguments.traces]
        table.add_row(variant, *row)
    return table


def _difference(
    arguments: argparse.Namespace, known: dict[tuple[str, str], Row], name: str, variant: str
) -> str:
    """What leaving something out changes for one kind of traffic."""
    cells = [str(_cell(arguments, name, seed)) for seed in arguments.seeds]
    pairs = [
        (known[variant, cell], known["whole", cell])
        for cell in cells
        if (variant, cell) in known and ("whole", cell) in known
    ]
    if not pairs:
        return "-"
    hit, base = (100 * fmean(pair[side]["hit_rate"] for pair in pairs) for side in (0, 1))
    ratios = []
    for key in ("ttft_p90_s", "virtual_s"):
        ours, whole = (fmean(pair[side][key] for pair in pairs) for side in (0, 1))
        ratios.append((ours, whole))
    if variant == "whole":
        return f"{hit:.1f} ({', '.join(f'{ours:.3g}' for ours, _ in ratios)})"
    return f"{hit - base:+.1f} ({', '.join(f'{ours / whole:.2f}' for ours, whole in ratios)})"


if __name__ == "__main__":
    sys.exit(main())
