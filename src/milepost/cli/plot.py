"""Pictures of a simulation; needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError
from milepost.simulator.results import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Hit rate, and p90 time to first token where there is time, over slots: a line a policy."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'milepost[plot]'") from error
    has_time = rows[0].ttft_p90_s is not None
    figure = Figure(figsize=(12 if has_time else 6.5, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if has_time else 1, squeeze=False)[0]
    _lines(axes[0], rows, "token hit rate, %", lambda row: 100 * row.hit_rate)
    if has_time:
        _lines(axes[1], rows, "time to first token, p90, s", lambda row: row.ttft_p90_s)
        axes[1].set_yscale("log")
    axes[0].legend()
    figure.suptitle(rows[0].trace)
    figure.savefig(path)


def _lines(
    axes: Any, rows: Sequence[Row], label: str, value: Callable[[Row], float | None]
) -> None:
    series: dict[str, list[Row]] = {}
    for row in rows:
        size = "" if row.num_pages is None else f", {row.num_pages} pages"
        series.setdefault(row.policy + size, []).append(row)
    for name, points in series.items():
        points.sort(key=lambda row: row.num_slots)
        axes.plot([p.num_slots for p in points], [value(p) for p in points], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("state slots")
    axes.set_ylabel(label)
