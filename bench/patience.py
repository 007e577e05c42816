"""How many others a request whose room they will want lets go first: what is reused, and who waits.

The table of docs/simulator.md:

    python bench/patience.py agent-dev.jsonl.gz [--overtaken 16 64 256 1024] [--seeds 0 1 2]

Memory for 60 % of the live sessions, in virtual time; means of the seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import rows
from rich.console import Console
from rich.table import Table

from milepost.scheduler import admission
from milepost.simulator.cost import read_cost
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES
from milepost.simulator.results import Row, run_row
from milepost.simulator.seeds import reseeded
from milepost.simulator.trace import Trace, read_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--overtaken", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--policies", nargs="+", default=["auto", "auto-split"], choices=POLICIES)
    parser.add_argument("--num-slots", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=4_492_800)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--limit", type=int, default=700, help="requests of the trace")
    parser.add_argument("--cost", default="hybrid-35b-a3b-h200")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, limit=arguments.limit)
    trace.link_answers()
    sha = rows.provenance()["git_sha"]
    table = Table(title=f"{arguments.trace.name}, commit {sha}", box=None)
    for column in ("overtaken", "policy", "hit %", "p50 s", "p90 s", "p99 s", "all done, s"):
        table.add_column(column, justify="right")
    console = Console(stderr=True)
    for overtaken in arguments.overtaken:
        for policy in arguments.policies:
            with console.status(f"{policy}, {overtaken}"):
                found = _replay(arguments, trace, overtaken, policy)
            table.add_row(str(overtaken), policy, *_means(found))
    Console(width=160).print(table)
    return 0


def _replay(arguments: argparse.Namespace, trace: Trace, overtaken: int, policy: str) -> list[Row]:
    """One row a seed."""
    admission.MAX_OVERTAKEN = overtaken  # no option: users need none
    cost, closed = read_cost(arguments.cost), trace.requests[0].session is not None
    sizes = {
        "num_pages": arguments.kv_tokens // trace.page_size,
        "num_slots": arguments.num_slots,
    }
    found = []
    for seed in arguments.seeds:
        cache = POLICIES[policy].memory(cost, page_size=trace.page_size, **sizes)
        run = Replay(reseeded(trace, seed), cache, cost, closed=closed).run()
        found.append(run_row(trace, policy, run, trace.bound(), seed=seed, **sizes))
    return found


def _means(found: list[Row]) -> list[str]:
    columns = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "virtual_s")
    hit = f"{100 * fmean(row.hit_rate for row in found):.2f}"
    return [hit, *(f"{fmean(getattr(row, name) for row in found):.1f}" for name in columns)]


if __name__ == "__main__":
    sys.exit(main())
