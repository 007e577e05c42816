"""`milepost simulate`: replays a request trace through scheduler and cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from milepost.cli.display import Screen
from milepost.cli.simulate_results import (
    WIDTH,
    AnyRow,
    draw_plot,
    fleet_table,
    goodput_table,
    hits_table,
    require_plot,
    rest_table,
)
from milepost.cli.simulate_settings import GIB, Settings
from milepost.errors import InvalidRequestError
from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.fleet import Fleet, Shape
from milepost.simulator.made import MADE, make_trace
from milepost.simulator.policies import CachePolicy, Pooled
from milepost.simulator.results import FleetRow, MemoryGib, common_fields, means, run_row
from milepost.simulator.search import smallest
from milepost.simulator.seeds import faster, reseeded
from milepost.simulator.trace import Trace, read_trace

DEFAULT_SESSIONS = 100
DEFAULT_ROUTINGS = ["round-robin", "session", "events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay of a trace."""

    policy: CachePolicy | Pooled
    seed: int
    gib: float
    """Memory of each engine."""
    num_engines: int | None = None
    """None for one engine, whose row says more than a fleet's."""
    routing: str = "round-robin"

    def __str__(self) -> str:
        if self.num_engines is not None:
            return f"{self.num_engines} x {self.routing}"
        return f"{self.policy.name}, {self.gib:g} GiB"


def command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def simulate(trace: Path, *, settings: Settings | None = None) -> None:
        """Replay a request trace, and show what each policy reuses at each memory size.

        Parameters
        ----------
        trace
            JSON lines, plain or gzip (docs/simulator.md lists the fields), or made-up traffic:
            agents, chats or agents+chats.
        """
        settings = settings or Settings()
        policies = settings.policies
        if settings.plot is not None:
            require_plot(settings.plot)
        if settings.json is not None:
            _require(settings.json)
        cost = read_cost(settings.cost)
        with screen.waiting(f"reading {trace}"):
            read = faster(_read(trace, settings), settings.load)
            if settings.predict_answers:
                read.link_answers()
            bound = read.bound()

        def run(cell: Cell) -> AnyRow:
            with _progress(screen, str(cell), len(read.requests)) as advance:
                return _row(reseeded(read, cell.seed), cell, settings, cost, bound, advance)

        if settings.target_hit_rate is not None:
            rows = _rows_of_search(settings, policies, run)
        else:
            rows = [run(cell) for cell in _cells(settings, policies)]
        _write(rows, screen, settings, bound)
        if settings.plot is not None:
            draw_plot(means(rows), settings.plot, bound)

    return simulate


def _read(trace: Path, settings: Settings) -> Trace:
    """Reads a file, or makes the traffic of that name."""
    if str(trace) in MADE and not trace.exists():
        made = make_trace(str(trace), settings.sessions or DEFAULT_SESSIONS)
        return replace(made, requests=made.requests[: settings.limit])
    if settings.sessions is not None:
        raise InvalidRequestError(
            f"--sessions {settings.sessions}: {trace} is a file; use {', '.join(MADE)}"
        )
    return read_trace(trace, block_size=settings.block_size, limit=settings.limit)


def _cells(settings: Settings, policies: Sequence[CachePolicy | Pooled]) -> Iterator[Cell]:
    """Yields all replays, in the order of their rows."""
    fleets: Sequence[int | None] = settings.fleet or [None]
    routings = (settings.routing or DEFAULT_ROUTINGS) if settings.fleet else ["round-robin"]
    seeds = range(settings.seeds)
    for num, gib, policy, routing, seed in product(
        fleets, settings.sizes, policies, routings, seeds
    ):
        yield Cell(policy=policy, seed=seed, gib=gib, num_engines=num, routing=routing)


def _rows_of_search(
    settings: Settings,
    policies: Sequence[CachePolicy | Pooled],
    run: Callable[[Cell], AnyRow],
) -> list[AnyRow]:
    """Returns each policy's rows for the smallest memory that reaches the target, or for the
    largest one tried."""
    assert settings.target_hit_rate is not None
    shown: list[AnyRow] = []
    for policy in policies:
        tried: dict[float, list[AnyRow]] = {}

        def hit_rate(
            gib: float,
            policy: CachePolicy | Pooled = policy,
            tried: dict[float, list[AnyRow]] = tried,
        ) -> float:
            rows = [run(Cell(policy=policy, seed=seed, gib=gib)) for seed in range(settings.seeds)]
            tried[gib] = rows
            return fmean(row.hit_rate for row in rows)

        gib = smallest(settings.target_hit_rate / 100, hit_rate)
        shown += tried[max(tried) if gib is None else gib]
    return shown


def _row(
    trace: Trace,
    cell: Cell,
    settings: Settings,
    cost: CostModel,
    bound: float,
    advance: Callable[[int], None],
) -> AnyRow:
    sizes = cost.split(int(cell.gib * GIB), trace.page_size, settings.max_num_seqs)
    pools: dict[str, Any] = {"num_pages": sizes[0], "num_slots": sizes[1]}
    shape = Shape(
        num_engines=cell.num_engines or 1,
        num_prefill=settings.prefill_engines,
        limits=settings.limits,
        bytes_per_s=settings.transfer_gb_s * 1e9,
    )
    run = Fleet(
        trace,
        lambda: cell.policy.memory(cost, **pools, page_size=trace.page_size),
        cost,
        shape,
        routing=cell.routing,
        closed=_is_closed(trace, settings),
        tiers=settings.tiers,
        patience=settings.patience,
    ).run(advance)
    gib = MemoryGib(device=cell.gib, host=settings.host_gib, disk=settings.disk_gib)
    name = cell.policy.name
    if cell.num_engines is None:
        return run_row(trace, name, run, bound, memory=gib, seed=cell.seed, **pools)
    return FleetRow(
        **common_fields(trace, name, run, bound, gib, cell.seed),
        routing=cell.routing,
        engines=shape.num_engines,
        prefill_engines=shape.num_prefill,
        moved_bytes=run.moved_bytes,
        busiest=run.busiest,
    )


def _is_closed(trace: Trace, settings: Settings) -> bool:
    if settings.arrivals == "auto":
        return any(request.session is not None for request in trace.requests)
    return settings.arrivals == "closed"


@contextmanager
def _progress(screen: Screen, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, nothing elsewhere."""
    if not screen.reports.is_terminal:
        yield lambda _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen.reports, transient=True
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def _require(path: Path) -> None:
    """Raises InvalidRequestError if `_write` cannot write there; called before replays that may
    take hours."""
    if str(path) != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise InvalidRequestError(f"--json {path}: name a file in an existing folder")


def _write(rows: list[Any], screen: Screen, settings: Settings, bound: float) -> None:
    path = settings.json
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    if path is not None and str(path) == "-":
        screen.answers.write(text)
        return
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"--json {path}: {error.strerror}") from error
    width = None if screen.answers.isatty() else WIDTH
    console = Console(file=screen.answers, highlight=False, width=width)
    shown = means(rows)
    if isinstance(rows[0], FleetRow):
        console.print(fleet_table(shown))
    else:
        console.print(hits_table(shown))
        console.print(rest_table(shown))
    if settings.counts_goodput:
        console.print(goodput_table(shown))
    console.print(f"{rows[0].trace}: {rows[0].requests} requests, bound {100 * bound:.1f} %")
