"""Goodput under more load than an engine can serve, in virtual time.

    python bench/overload.py [--sessions 240 480] [--gib 8] [--rows auto vllm]

Agents and chats whose clients give up after a minute without a first token and try twice more. An
answer is good if its first token comes within ten seconds of the question, retries included; the
table shows good answers as a share of all questions of the traffic, asked or not. vLLM's and
SGLang's policies run with requests in order of arrival, as their schedulers have it. The table of
docs/benchmarks.md, "Overload".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from rich.console import Console
from rich.table import Table

from milepost.cli.display import seconds
from milepost.scheduler.admission import Admission
from milepost.scheduler.planner import Planner
from milepost.simulator.clients import Patience
from milepost.simulator.cost import read_cost
from milepost.simulator.fleet import EngineLimits, Fleet, Shape
from milepost.simulator.made import MADE, make_trace
from milepost.simulator.policies import POLICIES
from milepost.simulator.results import GOOD_S, percentile

GIB = 2**30
COST = "hybrid-35b-a3b-h200"
FIRST_COME: dict[tuple[type, str], Callable[..., Any]] = {
    (Admission, "_may_hold_back"): lambda *_: False,
    (Admission, "_place"): lambda _, request: request.rank,
    (Planner, "_shortest"): lambda *_: [],
}
"""What stands in for the admission scheme without it: all are admitted as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    policy: str
    is_first_come: bool = False
    max_queue_wait_s: float | None = None


ROWS = {
    "auto": Row(policy="auto"),
    "auto-wait": Row(policy="auto", max_queue_wait_s=10.0),
    "no-admission": Row(policy="auto", is_first_come=True),
    "no-admission-wait": Row(policy="auto", is_first_come=True, max_queue_wait_s=10.0),
    "vllm": Row(policy="vllm", is_first_come=True),
    "sglang": Row(policy="sglang", is_first_come=True),
    "vllm-wait": Row(policy="vllm", is_first_come=True, max_queue_wait_s=10.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traffic", default="agents+chats", choices=MADE)
    parser.add_argument("--sessions", nargs="+", type=int, default=[240, 480])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of clients")
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "bench-overload.jsonl")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(box=None)
    for column in (
        "",
        "sessions",
        "good %",
        "asked",
        "answered",
        "p50",
        "p90",
        "given up",
        "hit %",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for num_sessions in arguments.sessions:
        for name in arguments.rows:
            row = run(arguments, name, num_sessions)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            table.add_row(name, f"{num_sessions}", *_cells(row))
            Console(stderr=True).print(f"{num_sessions} {name}: {_cells(row)}", style="dim")
    Console(width=110).print(table)
    return 0


def run(arguments: argparse.Namespace, name: str, num_sessions: int) -> dict[str, Any]:
    """Replays one cell; returns its row."""
    wanted, cost = ROWS[name], read_cost(COST)
    trace = make_trace(arguments.traffic, num_sessions, seed=arguments.seed)
    trace.link_answers()
    limits = EngineLimits(max_queue_wait_s=wanted.max_queue_wait_s)
    num_bytes = int(arguments.gib * GIB)
    num_pages, num_slots = cost.split(num_bytes, trace.page_size, limits.max_num_seqs)
    memory = POLICIES[wanted.policy].memory(
        cost, num_pages=num_pages, num_slots=num_slots, page_size=trace.page_size
    )
    patience = Patience(timeout_s=arguments.timeout_s)
    with _first_come(wanted.is_first_come):
        shape = Shape(limits=limits)
        found = Fleet(trace, lambda: memory, cost, shape, closed=True, patience=patience).run()
    asked, stats = found.asked, memory.stats
    return {
        "row": name,
        "sessions": num_sessions,
        "gib": arguments.gib,
        "seed": arguments.seed,
        "questions": len(trace.requests),
        "asked": asked.num_asked,
        "answered": len(asked.ttft_s),
        "good": asked.num_within(GOOD_S),
        "retries": asked.num_retries,
        "given_up": asked.num_given_up,
        "refusals": asked.num_refusals,
        **{f"p{p}_s": percentile(asked.ttft_s, p / 100) for p in (50, 90, 99)},
        "hit_rate": stats.hits / stats.queries,
        "gpu_hours": found.busy_s / 3600,
        "virtual_s": found.end_s,
        **rows.provenance(),
    }


@contextmanager
def _first_come(is_wanted: bool) -> Iterator[None]:
    """Leaves the admission scheme out."""
    parts = FIRST_COME if is_wanted else {}
    before = {part: getattr(*part) for part in parts}
    for (owner, name), value in parts.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{100 * row['good'] / row['questions']:.1f}",
        f"{row['asked']}",
        f"{row['answered']}",
        seconds(row["p50_s"]),
        seconds(row["p90_s"]),
        f"{row['given_up']}",
        f"{100 * row['hit_rate']:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
