"""Policies on recorded and made-up traffic with so many bytes for KV and states, in virtual time.

The tables of docs/policies.md:

    python bench/traces.py FOLDER [--traces agent-dev mix] [--seeds 0 1 2] [--policies auto ends]

Two pools divide the bytes by the engine's rule: a slot for each request that may run, and a sixth
of the rest. Each row is written when it is there, and a cell that the file already holds
is not run again, so a run that was stopped goes on. Another commit wants another file (`--out`); a
table made of several says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import rows
from peer_policies import ALL_POLICIES
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traffic import SIZES, read

from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.fleet import Fleet, Shape
from milepost.simulator.results import MemoryGib, run_row

NEAR = 0.003
"""Hit rates that differ by no more count as equal."""


MAX_NUM_SEQS = 64
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay. Its fields stand in its row."""

    trace: str
    limit: int
    cost: str
    seed: int
    gib: float
    policy: str

    def __str__(self) -> str:
        return f"{self.trace} seed {self.seed}, {self.gib:g} GiB, {self.policy}"

    def sizes(self, cost: CostModel, page_size: int) -> dict[str, int]:
        """Pages and slots, as two pools would have them."""
        num_pages, num_slots = cost.split(int(self.gib * GIB), page_size, MAX_NUM_SEQS)
        return {"num_pages": num_pages, "num_slots": num_slots}


Rows = dict[Cell, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with <trace>.jsonl.gz")
    parser.add_argument("--traces", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["auto", "auto-split", "vllm", "sglang"],
        choices=ALL_POLICIES,
    )
    parser.add_argument("--gib", nargs="+", type=float, help="in place of each traffic's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--limit", type=int, default=700, help="requests of each recorded trace")
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-traces.jsonl")
    arguments = parser.parse_args()
    known = _read(arguments.out)
    console, tables = Console(stderr=True), Console(width=200)
    cells = {name: _cells(arguments, name) for name in arguments.traces}
    _measure(arguments, [cell for held in cells.values() for cell in held], known, console)
    for name, held in cells.items():
        measured = {cell: known[cell] for cell in held}
        tables.print(_figures_table(name, arguments.policies, measured))
        if "auto" in arguments.policies and len(arguments.policies) > 1:
            _print_margins(name, measured, tables)
    console.print(f"rows: {arguments.out}", style="dim")
    return 0


def _cells(arguments: argparse.Namespace, name: str) -> list[Cell]:
    return [
        Cell(
            trace=name,
            limit=arguments.limit,
            cost=arguments.cost,
            seed=seed,
            gib=gib,
            policy=policy,
        )
        for seed in arguments.seeds
        for gib in arguments.gib or SIZES[name]
        for policy in arguments.policies
    ]


# --- running --------------------------------------------------------------------------------------


def _measure(
    arguments: argparse.Namespace, cells: list[Cell], known: Rows, console: Console
) -> None:
    """Run the cells; each row goes into `known` and to the end of the file."""
    missing = [cell for cell in cells if cell not in known]
    commit = {"git_sha": rows.provenance()["git_sha"]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    replay = functools.partial(run, arguments.folder)
    context = multiprocessing.get_context("fork")
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        found = pool.imap_unordered(replay, missing)
        for row in track(found, total=len(missing), console=console, transient=True):
            cell = _cell_of(row)
            known[cell] = commit | row
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[cell]) + "\n")
            console.print(f"{cell}: {_figures([row])}", style="dim", soft_wrap=True)


def run(folder: Path, cell: Cell) -> dict[str, Any]:
    """Replays one cell; returns its row."""
    trace, cost = read(cell.trace, folder, limit=cell.limit, seed=cell.seed), read_cost(cell.cost)
    sizes = cell.sizes(cost, trace.page_size)
    cache = ALL_POLICIES[cell.policy].memory(cost, page_size=trace.page_size, **sizes)
    closed = trace.requests[0].session is not None
    replayed = Fleet(trace, lambda: cache, cost, Shape(), closed=closed).run()
    memory = MemoryGib(device=cell.gib)
    bound = trace.bound()
    row = run_row(trace, cell.policy, replayed, bound, memory=memory, seed=cell.seed, **sizes)
    return asdict(row) | asdict(cell)


def _cell_of(row: dict[str, Any]) -> Cell:
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def _read(path: Path) -> Rows:
    if not path.exists():
        return {}
    held = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {_cell_of(row): row for row in held}


# --- tables ---------------------------------------------------------------------------------------


def _by_size(measured: Rows) -> dict[float, dict[str, list[dict[str, Any]]]]:
    """Rows of the seeds, by GiB and policy."""
    found: dict[float, dict[str, list[dict[str, Any]]]] = {}
    for cell, row in measured.items():
        found.setdefault(cell.gib, {}).setdefault(cell.policy, []).append(row)
    return found


def _figures_table(name: str, policies: list[str], measured: Rows) -> Table:
    """A line a size and policy would be long: a line a policy, a column a size. Means of seeds."""
    sizes = _by_size(measured)
    commits = {row["git_sha"] for row in measured.values()}
    mixed = "" if len(commits) == 1 else f"; commits {', '.join(sorted(commits))}"
    title = f"{name}: hit % (lowest, highest); first token p50, p90, p99; all done{mixed}"
    table = Table(title=title, box=None)
    for column in ("policy", *(f"{gib:g} GiB" for gib in sizes)):
        table.add_column(column, justify="right")
    for policy in policies:
        table.add_row(policy, *(_figures(at[policy]) for at in sizes.values()))
    return table


def _figures(measured: list[dict[str, Any]]) -> str:
    """Means of the seeds."""
    hits = [100 * row["hit_rate"] for row in measured]
    waits = [fmean(row[f"ttft_p{p}_s"] for row in measured) for p in (50, 90, 99)]
    ends = fmean(row["virtual_s"] for row in measured)
    return (
        f"{fmean(hits):.1f} ({min(hits):.1f}, {max(hits):.1f}); "
        f"{', '.join(f'{wait_s:.2g}' for wait_s in waits)}; {ends:.0f} s"
    )


def _hit(measured: list[dict[str, Any]]) -> float:
    return fmean(row["hit_rate"] for row in measured)


def _p90_s(measured: list[dict[str, Any]]) -> float:
    return fmean(row["ttft_p90_s"] for row in measured)


def _print_margins(name: str, measured: Rows, console: Console) -> None:
    """How far `auto` is before or behind the best of the others, size by size."""
    table = Table(title=f"{name}: auto beside the best other", box=None, padding=(0, 2, 0, 0))
    for column in ("GiB", "hit %", "best other", "points", "p90 s", "best other", "x"):
        table.add_column(column, justify="right")
    margins, ratios = [], []
    for gib, at in _by_size(measured).items():
        ours = at.pop("auto")
        hits = max((_hit(held), policy) for policy, held in at.items())
        waits = min((_p90_s(held), policy) for policy, held in at.items())
        margins.append(_hit(ours) - hits[0])
        ratios.append(_p90_s(ours) / waits[0])
        table.add_row(
            *(f"{gib:g}", f"{100 * _hit(ours):.2f}", f"{100 * hits[0]:.2f} {hits[1]}"),
            f"{100 * margins[-1]:+.2f}",
            *(f"{_p90_s(ours):.1f}", f"{waits[0]:.1f} {waits[1]}", f"{ratios[-1]:.2f}"),
        )
    console.print(table)
    first = sum(margin >= -NEAR for margin in margins)
    soonest = sum(ratio <= 1 for ratio in ratios)
    console.print(
        f"hit rate first or within 0.3 points of it in {first} of {len(margins)}; "
        f"p90 first in {soonest}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
