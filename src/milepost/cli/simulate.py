"""`milepost simulate`: replays a request trace through scheduler and cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from milepost.cli import plot
from milepost.cli.display import Screen
from milepost.cli.simulate_fleet import fleet_table, run_fleet
from milepost.cli.simulate_settings import GIB, Settings
from milepost.cli.simulate_tables import WIDTH, hits_table, rest_table
from milepost.errors import InvalidRequestError
from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.fleet.results import FleetRow, fleet_means
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES, CachePolicy, Pooled
from milepost.simulator.results import MemoryGib, ResultRow, means, run_row, slots_row
from milepost.simulator.search import smallest
from milepost.simulator.seeds import reseeded
from milepost.simulator.slots import replay
from milepost.simulator.trace import Trace, read_trace

COMPARED = ["auto", "forks-cap2", "ends", "interval-cap3", "interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay: a policy, a seed and a size of memory."""

    policy: CachePolicy | Pooled
    seed: int
    gib: float | None = None
    num_slots: int = 0
    kv_tokens: int | None = None
    """Tokens of KV. Without this and GiB, only slots are limited."""

    def __str__(self) -> str:
        size = f"{self.num_slots} slots" if self.gib is None else f"{self.gib:g} GiB"
        return f"{self.policy.name}, {size}"

    def sizes(self, cost: CostModel, page_size: int, max_num_seqs: int) -> tuple[int, int]:
        """Returns the numbers of pages and slots in two pools."""
        if self.gib is not None:
            return cost.split(int(self.gib * GIB), page_size, max_num_seqs)
        assert self.kv_tokens is not None
        return -(-self.kv_tokens // page_size), self.num_slots


def simulate_command(screen: Screen) -> Callable[..., None]:
    """Makes the command, for a terminal."""

    def simulate(trace: Path, *, settings: Settings | None = None) -> None:
        """Replay a request trace, and show what each policy reuses at each memory size.

        Parameters
        ----------
        trace
            JSON lines, plain or gzip; docs/simulator.md lists the fields.
        """
        settings = settings or Settings()
        policies = _policies(settings)
        if settings.plot is not None:
            plot.require(settings.plot)
        if settings.json is not None:
            _require(settings.json)
        cost = read_cost(settings.cost)
        with screen.waiting(f"reading {trace}"):
            read = read_trace(trace, block_size=settings.block_size, limit=settings.limit)
            if settings.predict_answers and settings.has_time:
                read.link_answers()
            bound = read.bound()

        def run(cell: Cell) -> ResultRow:
            with _progress(screen, str(cell), len(read.requests)) as advance:
                return _row(reseeded(read, cell.seed), cell, settings, cost, bound, advance)

        if settings.fleet is not None:
            closed = _is_closed(read, settings)
            progress = partial(_progress, screen)
            found = run_fleet(read, settings, cost, bound, closed=closed, progress=progress)
            _write(list(found), screen, settings.json, bound)
            return
        if settings.target_hit_rate is None:
            rows = [run(cell) for cell in _cells(settings, policies)]
        else:
            rows = _rows_of_search(settings, policies, run)
        _write(rows, screen, settings.json, bound)
        if settings.plot is not None:
            plot.draw(means(rows), settings.plot, bound)

    return simulate


def _cells(settings: Settings, policies: Sequence[CachePolicy | Pooled]) -> list[Cell]:
    sizes: list[dict[str, Any]] = [{"gib": gib} for gib in settings.gib or []]
    sizes = sizes or [
        {"kv_tokens": kv_tokens, "num_slots": num_slots}
        for kv_tokens in settings.kv_tokens or [None]
        for num_slots in settings.num_slots or [64, 128, 256, 512]
    ]
    return [
        Cell(policy=policy, seed=seed, **size)
        for size in sizes
        for policy in policies
        for seed in range(settings.seeds)
    ]


def _rows_of_search(
    settings: Settings,
    policies: Sequence[CachePolicy | Pooled],
    run: Callable[[Cell], ResultRow],
) -> list[ResultRow]:
    """Returns each policy's rows for the smallest memory that reaches the target, or for the
    largest one tried."""
    assert settings.target_hit_rate is not None
    found: list[ResultRow] = []
    for policy in policies:
        tried: dict[float, list[ResultRow]] = {}

        def hit_rate(
            gib: float,
            policy: CachePolicy | Pooled = policy,
            tried: dict[float, list[ResultRow]] = tried,
        ) -> float:
            rows = [run(Cell(policy=policy, seed=seed, gib=gib)) for seed in range(settings.seeds)]
            tried[gib] = rows
            return fmean(row.hit_rate for row in rows)

        gib = smallest(settings.target_hit_rate / 100, hit_rate)
        found += tried[max(tried) if gib is None else gib]
    return found


def _policies(settings: Settings) -> list[CachePolicy | Pooled]:
    names = settings.policy or COMPARED
    if list(names) == ["all"]:
        has_pools = settings.has_time and not settings.host_gib
        return [p for p in POLICIES.values() if has_pools or isinstance(p, CachePolicy)]
    for name in names:
        if name not in POLICIES:
            raise InvalidRequestError(f"--policy {name}: use {', '.join(POLICIES)}")
        if not settings.has_time and isinstance(POLICIES[name], Pooled):
            raise InvalidRequestError(
                f"--policy {name}: states and KV share its memory; give --gib, or --kv-tokens too"
            )
        if settings.host_gib and isinstance(POLICIES[name], Pooled):
            raise InvalidRequestError(f"--policy {name}: its tiers are not modelled; leave one out")
    return [POLICIES[name] for name in names]


def _row(
    trace: Trace,
    cell: Cell,
    settings: Settings,
    cost: CostModel,
    bound: float,
    advance: Callable[[int], None],
) -> ResultRow:
    policy, page_size = cell.policy, trace.page_size
    if not settings.has_time:
        assert isinstance(policy, CachePolicy), "pooled policies are refused without KV's size"
        cache = replay(trace, cell.num_slots, policy=policy, on_request=advance)
        return slots_row(trace, policy.name, cache, bound, seed=cell.seed)
    num_pages, num_slots = cell.sizes(cost, page_size, settings.max_num_seqs)
    run = Replay(
        trace,
        policy.memory(cost, num_pages=num_pages, num_slots=num_slots, page_size=page_size),
        cost,
        closed=_is_closed(trace, settings),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        tiers=settings.tiers if isinstance(policy, CachePolicy) else None,
    ).run(advance)
    memory = MemoryGib(
        device=cell.gib or cost.bytes_of(num_pages, num_slots, page_size) / GIB,
        host=settings.host_gib,
        disk=settings.disk_gib,
    )
    return run_row(
        trace,
        policy.name,
        run,
        bound,
        num_pages=num_pages,
        num_slots=num_slots,
        memory=memory,
        seed=cell.seed,
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
        raise InvalidRequestError(f"--json {path}: name a file in a folder that is there")


def _write(rows: list[Any], screen: Screen, path: Path | None, bound: float) -> None:
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
    if isinstance(rows[0], FleetRow):
        console.print(fleet_table(fleet_means(rows)))
    else:
        shown = means(rows)
        console.print(hits_table(shown))
        console.print(rest_table(shown))
    console.print(f"{rows[0].trace}: {rows[0].requests} requests, bound {100 * bound:.1f} %")
