"""Policies on recorded traces with both pools limited, in virtual time: the tables of
docs/simulator.md.

    python bench/traces.py FOLDER [--seeds 0 1 2] [--policies auto ends] [--traces agent-dev]

Sizes follow the traffic: `live` conversations, 1, 2, 4 and 8 slots for each, and KV for 60, 100 and
200 % of their tokens. Each row is written when it is there, and rows that a file already holds for
this commit are not run again; so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import rows
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from milepost.simulator.cost import read_cost
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES
from milepost.simulator.results import run_row
from milepost.simulator.seeds import reseeded
from milepost.simulator.trace import Trace, read_trace

SLOTS_EACH = (1, 2, 4, 8)
KV_SHARES = (0.6, 1.0, 2.0)
COMPARED = ("auto", "forks-cap2", "ends", "efficiency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A trace's first `limit` requests, with so many live conversations of so many tokens."""

    limit: int
    live: int
    tokens_each: int


TRAFFIC = {
    "agent-dev": Traffic(limit=2000, live=64, tokens_each=117_000),
    "mooncake-conversation": Traffic(limit=2000, live=256, tokens_each=12_000),
    "mooncake-synthetic": Traffic(limit=2000, live=256, tokens_each=15_300),
}
"""On agent-dev as many are live until request 2000, with 7.5 M tokens. The other two don't record
sessions: 256 prompts of the mean length.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with <trace>.jsonl.gz")
    parser.add_argument("--traces", nargs="+", default=list(TRAFFIC), choices=TRAFFIC)
    parser.add_argument("--policies", nargs="+", default=list(COMPARED), choices=POLICIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-traces.jsonl")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    for name in arguments.traces:
        measured = list(_measure(arguments, name, console))
        Console(width=120).print(_table(name, arguments.policies, measured))
    console.print(f"rows: {arguments.out}", style="dim")
    return 0


def _measure(
    arguments: argparse.Namespace, name: str, console: Console
) -> Iterator[dict[str, Any]]:
    """The rows of one trace, from the file or run now and added to it."""
    known = {_key(row): row for row in _read(arguments.out)}
    common = {"git_sha": rows.provenance()["git_sha"], "cost": arguments.cost}
    traffic = TRAFFIC[name]
    trace = read_trace(arguments.folder / f"{name}.jsonl.gz", limit=traffic.limit)
    trace.link_answers()
    for seed, slots, tokens, policy in _cells(arguments, traffic):
        cell = common | {"trace": name, "seed": seed, "slots": slots, "kv_tokens": tokens}
        cell["policy"] = policy
        if _key(cell) not in known:
            row = _run(reseeded(trace, seed), cell, console)
            known[_key(cell)] = row
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        yield known[_key(cell)]


def _cells(arguments: argparse.Namespace, traffic: Traffic) -> list[tuple[int, int, int, str]]:
    return [
        (seed, each * traffic.live, int(share * traffic.live * traffic.tokens_each), policy)
        for seed in arguments.seeds
        for share in KV_SHARES
        for each in SLOTS_EACH
        for policy in arguments.policies
    ]


def _run(trace: Trace, cell: dict[str, Any], console: Console) -> dict[str, Any]:
    page_size = trace.page_size
    cache = POLICIES[cell["policy"]].cache(
        num_pages=cell["kv_tokens"] // page_size, num_slots=cell["slots"], page_size=page_size
    )
    closed = trace.requests[0].session is not None
    label = f"{trace.name} seed {cell['seed']}: {cell['slots']} slots, {cell['kv_tokens']} tokens"
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{label}, {cell['policy']}", total=len(trace.requests))
        run = Replay(trace, cache, read_cost(cell["cost"]), closed=closed).run(
            lambda done: progress.update(task, completed=done)
        )
    row = (
        cell | asdict(run_row(trace, cell["policy"], run, trace.bound())) | {"trace": cell["trace"]}
    )
    console.print(f"{label}, {cell['policy']}: {_figures([row])}", style="dim", soft_wrap=True)
    return row


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("git_sha", "cost", "trace", "seed", "slots", "kv_tokens", "policy")
    return tuple(row[name] for name in names)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(name: str, policies: list[str], measured: list[dict[str, Any]]) -> Table:
    """A line a size, means over the seeds: hit %, then p90 time to first token in seconds."""
    table = Table(title=f"{name}: hit %, p90 time to first token", box=None, padding=(0, 2, 0, 0))
    for column in ("slots", "KV tokens", *policies):
        table.add_column(column, justify="right")
    sizes = dict.fromkeys((row["slots"], row["kv_tokens"]) for row in measured)
    for size in sizes:
        here = [row for row in measured if (row["slots"], row["kv_tokens"]) == size]
        cells = [_figures([row for row in here if row["policy"] == p]) for p in policies]
        table.add_row(f"{size[0]}", f"{size[1] / 1e6:.1f} M", *cells)
    return table


def _figures(measured: list[dict[str, Any]]) -> str:
    hit = 100 * fmean(row["hit_rate"] for row in measured)
    return f"{hit:.2f}  {fmean(row['ttft_p90_s'] for row in measured):.1f} s"


if __name__ == "__main__":
    sys.exit(main())
