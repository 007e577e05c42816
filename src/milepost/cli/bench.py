"""`milepost bench`: loads a server with OpenAI's API, and shows how it performs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.table import Table

from milepost.cli.display import Screen, counting_requests
from milepost.cli.flags import Flags, add_flags
from milepost.errors import ConfigError, needing
from milepost.load.drive import DriveConfig
from milepost.load.workloads import WorkloadConfig, sessions

DRIVE = Flags(config=DriveConfig, group=Group("Load", sort_key=1), renamed={})
LOAD = Flags(config=WorkloadConfig, group=Group("Workload", sort_key=2), renamed={})


def command(screen: Screen) -> Callable[..., int]:
    """Makes the command; it prints its table to the screen's reports."""
    reports = screen.reports

    def bench(
        *,
        out: Annotated[
            Path | None, Parameter(help="Append the row to this file of JSON lines.")
        ] = None,
        **settings: Any,
    ) -> int:
        """Load a server, and show latencies, rates and its cache's hit rate.

        Works with any server that streams /v1/chat/completions. The row goes to standard output as
        JSON, the table to standard error.
        """
        config, workload = DRIVE.build(settings), LOAD.build(settings)
        drive, summarize = _driver()
        if out is not None:
            _check_out(out)
        load = sessions(workload)
        total = sum(len(session.turns) for session in load)
        with counting_requests(reports, total) as advance:
            driving = drive(
                config,
                load,
                seed=workload.workload_seed,
                progress=lambda result: advance(result.is_complete),
            )
            results, seconds = asyncio.run(driving)
        row = {**_row_head(config, workload), **summarize(results, seconds)}
        print(json.dumps(row), flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        reports.print(_table(row))
        return 1 if row["failed"] else 0

    return add_flags(bench, [DRIVE, LOAD])


def _driver() -> tuple[Callable[..., Any], Callable[..., dict[str, Any]]]:
    """Returns `drive` and `summarize`. Raises ConfigError if their library is not installed."""
    with needing("bench", "server"):
        from milepost.load.drive import drive, summarize
    return drive, summarize


def _check_out(out: Path) -> None:
    """Raises ConfigError if the file cannot be appended to; called before the load rather than
    after."""
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _row_head(config: Any, workload: WorkloadConfig) -> dict[str, Any]:
    """Describes the measurement for the row, without the API key."""
    return {
        "base_url": config.base_url,
        "workload": workload.workload,
        "seed": workload.workload_seed,
        "loop": "open" if config.request_rate or workload.workload == "trace" else "closed",
        "request_rate": "inf" if config.request_rate == inf else config.request_rate,
        "concurrency": None if config.request_rate else config.concurrency,
    }


def _or_unknown(value: float | None) -> str:
    """Shows a number that the server did not report as unknown, not as 0."""
    return "unknown" if value is None else str(value)


def _table(row: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "p50", "p90", "p99", "mean"):
        table.add_column(name, justify="left" if not name else "right")
    names = {
        "ttft_ms": "first token, ms",
        "tpot_ms": "per output token, ms",
        "itl_ms": "between deliveries, ms",
        "e2e_ms": "whole answer, ms",
    }
    for key, label in names.items():
        if row[key]:
            table.add_row(label, *(f"{row[key][p]:.1f}" for p in ("p50", "p90", "p99", "mean")))
    share = "unknown" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
    table.add_row()
    table.add_row(f"{row['requests']} requests, {row['failed']} failed, {row['seconds']:.1f} s")
    rate, prompt = (_or_unknown(row[key]) for key in ("output_tokens_per_s", "prompt_tokens"))
    table.add_row(f"{row['requests_per_s']} requests/s, {rate} tokens/s out")
    table.add_row(f"{share} of {prompt} prompt tokens from the cache")
    for error in row["errors"]:
        table.add_row(error)
    return table
