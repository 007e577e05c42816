"""Plots a simulation with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from milepost.cli.display import seconds
from milepost.errors import ConfigError, missing
from milepost.simulator.results import FleetRow, ResultRow

AnyRow = ResultRow | FleetRow

_STYLES = ("-", "--", ":", "-.")


def require(path: Path) -> None:
    """Raises ConfigError if no plot can be drawn there; called before replays that may take
    hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise missing("--plot", "matplotlib", "plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(rows: Sequence[AnyRow], path: Path, bound: float) -> None:
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
