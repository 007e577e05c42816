"""What the cache core costs on a recorded trace, and where the time goes.

    python bench/core_on_traces.py TRACE [--num-slots 64 256] [--top 12]

Replays with slots limited alone, twice for each size: once for the time and the memory, once under
the profiler for the shares. A page is visited when a request's prompt holds it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from slots import replay

from milepost.simulator.trace import Trace, read_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num-slots", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--top", type=int, default=12)
    arguments = parser.parse_args()
    console = Console(width=100)
    trace = read_trace(arguments.trace, limit=arguments.limit)
    pages = sum(len(request.page_ids) for request in trace.requests)
    console.print(f"{trace.name}: {len(trace.requests)} requests, {pages} pages visited")
    console.print(f"read: {_peak_mib():.0f} MiB at most")
    for num_slots in arguments.num_slots:
        before = time.process_time()
        replay(trace, num_slots)
        seconds = time.process_time() - before
        console.print(
            f"{num_slots} slots: {seconds:.2f} s, {1e6 * seconds / pages:.2f} us per page, "
            f"{1e3 * seconds / len(trace.requests):.2f} ms per request, {_peak_mib():.0f} MiB"
        )
        console.print(_shares(trace, num_slots, arguments.top))
    return 0


def _shares(trace: Trace, num_slots: int, top: int) -> Table:
    profile = cProfile.Profile()
    profile.runcall(replay, trace, num_slots)
    functions = pstats.Stats(profile).get_stats_profile().func_profiles
    total = sum(row.tottime for row in functions.values())
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("share", "calls", "function"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for name, row in sorted(functions.items(), key=lambda item: -item[1].tottime)[:top]:
        where = f"{name} ({Path(row.file_name).name}:{row.line_number})"
        table.add_row(f"{100 * row.tottime / total:.1f} %", str(row.ncalls), where)
    return table


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
