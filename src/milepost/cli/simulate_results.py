"""Shows the results of a simulation: in tables no wider than a terminal of 80 columns, and in a
plot by matplotlib, which the extra `plot` installs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from milepost.cli.display import seconds
from milepost.errors import ConfigError, missing
from milepost.simulator.results import GOOD_S, FleetRow, ResultRow

AnyRow = ResultRow | FleetRow

WIDTH = 80
"""Width of tables if the output is not a terminal."""
_TEXTS = ("policy", "routing", "lost to", "")
"""Columns of text."""


def hits_table(rows: Sequence[ResultRow]) -> Table:
    """Shows hit rates, times to first token, and GPU time."""
    has_tiers = any(row.host_gib for row in rows)
    names = ["policy", "GiB", "hit %", *(["loaded %"] if has_tiers else [])]
    table = _table([*names, "ttft p50", "p90", "p99", "GPU h", "saved", "refused"])
    for row in rows:
        cells = [f"{100 * row.hit_rate:.2f}"]
        if has_tiers:
            cells.append(f"{100 * sum(row.loaded.values()) / row.queries:.2f}")
        times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
        cells += ["-" if time is None else seconds(time) for time in times]
        cells += [f"{row.gpu_hours:.2f}", f"{row.gpu_hours_saved:.2f}", f"{row.refused}"]
        table.add_row(row.policy, f"{row.gib:.1f}", *cells)
    return table


def goodput_table(rows: Sequence[AnyRow]) -> Table:
    """Shows what clients asked and got, as counts of requests."""
    names = ["", "asked", f"in {GOOD_S:g} s", "of all", "retries", "refused", "given up"]
    table = _table(names)
    for row in rows:
        name = row.policy if isinstance(row, ResultRow) else f"{row.policy}, {row.routing}"
        cells = [f"{row.asked}", f"{row.good}", f"{100 * row.good / row.requests:.1f} %"]
        cells += [f"{row.retries}", f"{row.queue_refusals}", f"{row.given_up}"]
        table.add_row(name, *cells)
    return table


def rest_table(rows: Sequence[ResultRow]) -> Table:
    """Shows the computed tokens with their reasons, and the fate of the saved states."""
    table = _table(["policy", "GiB", "computed", "made", "used", "unused", "lost to"])
    for row in rows:
        cells = [f"{row.prefill_tokens / 1e6:.2f} M", f"{row.checkpoints_made}"]
        cells += [f"{row.checkpoints_used}", f"{row.checkpoints_evicted_unused}", _losses(row)]
        table.add_row(row.policy, f"{row.gib:.1f}", *cells)
    return table


def fleet_table(rows: Sequence[FleetRow]) -> Table:
    """Shows hit rates, times to first token, and how evenly the engines are loaded."""
    names = ["routing", "engines", "GiB", "hit %", "ttft p50", "p90", "p99", "GPU h", "saved"]
    names += ["busiest"]
    has_pools = any(row.prefill_engines for row in rows)
    table = _table(names + (["moved"] if has_pools else []))
    for row in rows:
        pools = f"{row.prefill_engines}+{row.engines - row.prefill_engines}"
        times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
        cells = [pools if row.prefill_engines else f"{row.engines}", f"{row.gib:g}"]
        cells += [f"{100 * row.hit_rate:.2f}"]
        cells += ["-" if time is None else seconds(time) for time in times]
        cells += [f"{row.gpu_hours:.2f}", f"{row.gpu_hours_saved:.2f}", f"{row.busiest:.2f}"]
        cells += [f"{row.moved_bytes / 1e9:.0f} GB"] if has_pools else []
        table.add_row(row.routing, *cells)
    return table


def _table(names: Sequence[str]) -> Table:
    """Makes a table without lines; all columns except `_TEXTS` are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        is_text = name in _TEXTS
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "lost to")
    return table


def _losses(row: ResultRow) -> str:
    """Names the two largest losses, in per cent of the prompt tokens."""
    largest = sorted(row.lost.items(), key=lambda loss: -loss[1])[:2]
    return ", ".join(f"{name} {100 * count / row.queries:.1f}" for name, count in largest)


_STYLES = ("-", "--", ":", "-.")


def require_plot(path: Path) -> None:
    """Raises ConfigError if no plot can be drawn there; called before replays that may take
    hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise missing("--plot", "matplotlib", "plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw_plot(rows: Sequence[AnyRow], path: Path, bound: float) -> None:
    """Draws the hit rate with its bound, and the p90 time to first token. Each policy is a line
    over memory, each routing of a fleet one over the number of engines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    hits, waits = figure.subplots(1, 2)
    _lines(hits, rows, "token hit rate, %", lambda row: 100 * row.hit_rate)
    _lines(waits, rows, "time to first token, p90", lambda row: row.ttft_p90_s)
    waits.set_yscale("log")
    waits.yaxis.set_major_formatter(lambda value, _: seconds(value))
    waits.yaxis.set_minor_formatter(lambda value, _: seconds(value))
    hits.axhline(100 * bound, color="gray", linestyle="--", label="bound")
    hits.set_ylim(0, 102)
    hits.legend()
    figure.suptitle(rows[0].trace)
    figure.savefig(path)


def _lines(
    axes: Any, rows: Sequence[AnyRow], label: str, value: Callable[[AnyRow], float | None]
) -> None:
    series: dict[tuple[str, ...], list[AnyRow]] = {}
    for row in rows:
        series.setdefault(_parts(row), []).append(row)
    varying = [len(set(column)) > 1 for column in zip(*series, strict=True)]
    colours = list(dict.fromkeys(parts[:2] for parts in series))
    styles = list(dict.fromkeys(parts[2:] for parts in series))
    for parts, points in series.items():
        points.sort(key=_size)
        named = [part for part, is_varying in zip(parts, varying, strict=True) if is_varying]
        axes.plot(
            [_size(p) for p in points],
            [value(p) for p in points],
            marker="o",
            color=f"C{colours.index(parts[:2])}",
            linestyle=_STYLES[styles.index(parts[2:]) % len(_STYLES)],
            label=", ".join(named) or parts[0],
        )
    axes.set_xscale("log", base=2)
    sizes = sorted({_size(row) for row in rows})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xlabel("engines" if isinstance(rows[0], FleetRow) else "GiB")
    axes.set_ylabel(label)


def _parts(row: AnyRow) -> tuple[str, ...]:
    """Returns what sets a line apart: policy and routing choose its colour, memory its style."""
    if isinstance(row, ResultRow):
        return row.policy, "", ""
    return row.policy, row.routing, f"{row.gib:g} GiB"


def _size(row: AnyRow) -> float:
    return row.gib if isinstance(row, ResultRow) else row.engines
