"""Tables of a simulation, no wider than a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from milepost.cli.display import seconds
from milepost.simulator.results import GOOD_S, FleetRow, ResultRow

WIDTH = 80
"""Width of tables if the output is not a terminal."""


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


def goodput_table(rows: Sequence[ResultRow | FleetRow]) -> Table:
    """Shows what clients asked and got, as counts of requests."""
    names = ["", "asked", f"in {GOOD_S:g} s", "of all", "retries", "refused", "given up"]
    table = plain_table(names, ("",))
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


def _table(names: Sequence[str]) -> Table:
    return plain_table(names, ("policy", "lost to"))


def plain_table(names: Sequence[str], texts: Sequence[str]) -> Table:
    """Makes a table without lines; all columns except `texts` are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        is_text = name in texts
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "lost to")
    return table


def _losses(row: ResultRow) -> str:
    """Names the two largest losses, in per cent of the prompt tokens."""
    largest = sorted(row.lost.items(), key=lambda loss: -loss[1])[:2]
    return ", ".join(f"{name} {100 * count / row.queries:.1f}" for name, count in largest)
