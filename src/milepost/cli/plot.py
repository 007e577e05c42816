"""Plots a simulation with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError, missing
from milepost.simulator.results import ResultRow


def require(path: Path) -> None:
    """Raises ConfigError if no plot can be drawn there; called before replays that may take
    hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise missing("--plot", "matplotlib", "plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(rows: Sequence[ResultRow], path: Path, bound: float) -> None:
    """Draw the hit rate with its bound, and the p90 time to first token if there is time, over
    memory. Each policy is a line."""
    from matplotlib.figure import Figure

    has_time = rows[0].ttft_p90_s is not None
    figure = Figure(figsize=(12 if has_time else 6.5, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if has_time else 1, squeeze=False)[0]
    _lines(axes[0], rows, "token hit rate, %", lambda row: 100 * row.hit_rate)
    if has_time:
        _lines(axes[1], rows, "time to first token, p90, s", lambda row: row.ttft_p90_s)
        axes[1].set_yscale("log")
        axes[1].yaxis.set_major_formatter("{x:g}")
        axes[1].yaxis.set_minor_formatter("{x:g}")
    axes[0].axhline(100 * bound, color="gray", linestyle="--", label="bound")
    axes[0].set_ylim(0, 102)
    axes[0].legend()
    figure.suptitle(rows[0].trace)
    figure.savefig(path)


def _lines(
    axes: Any, rows: Sequence[ResultRow], label: str, value: Callable[[ResultRow], float | None]
) -> None:
    series: dict[str, list[ResultRow]] = {}
    for row in rows:
        series.setdefault(row.policy, []).append(row)
    for name, points in series.items():
        points.sort(key=_size)
        axes.plot([_size(p) for p in points], [value(p) for p in points], "o-", label=name)
    axes.set_xscale("log", base=2)
    sizes = sorted({_size(row) for row in rows})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xlabel("state slots" if rows[0].gib is None else "GiB")
    axes.set_ylabel(label)


def _size(row: ResultRow) -> float:
    return row.num_slots if row.gib is None else row.gib
