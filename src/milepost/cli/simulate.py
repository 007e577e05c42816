"""`milepost simulate`: replays a request trace through scheduler and cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from milepost.cli.display import Screen
from milepost.cli.simulate_fleet import check_fleet, fleet_table, run_fleet
from milepost.cli.simulate_tables import WIDTH, hits_table, rest_table
from milepost.errors import InvalidRequestError
from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.fleet.results import FleetRow, fleet_means
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES, CachePolicy, Pooled
from milepost.simulator.results import ResultRow, means, run_row, slots_row
from milepost.simulator.search import smallest
from milepost.simulator.seeds import reseeded
from milepost.simulator.slots import replay
from milepost.simulator.tiers import TierSizes
from milepost.simulator.trace import Trace, read_trace

COMPARED = ["auto", "forks-cap2", "ends", "interval-cap3", "interval"]
GIB = 2**30
_List = Parameter(negative_iterable=(), consume_multiple=True)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is replayed, and on what. One flag a field."""

    gib: Annotated[list[float] | None, _List] = None
    """Sizes of the device's memory for KV and states together, in GiB. Where a policy has two
    pools, a slot for each request that may run and a sixth of the rest are for states."""
    target_hit_rate: float | None = None
    """Find the least memory with which each policy hits so many per cent of the prompt tokens."""
    host_gib: float = 0.0
    """Host memory, in GiB, for what leaves the device's."""
    disk_gib: float = 0.0
    """The same on a disk; what goes there goes through host memory."""
    host_gb_s: float = 20.0
    """GB that cross the link to host memory in a second, each way."""
    disk_gb_s: float = 2.0
    """GB that are read from the disk in a second, or written to it."""
    num_slots: Annotated[list[int] | None, _List] = None
    """Sizes of the slot pool (default 64 128 256 512), where no GiB are given."""
    kv_tokens: Annotated[list[int] | None, _List] = None
    """Sizes of the page pool in tokens. Without these and GiB, KV is unlimited, time stands still,
    a running request's slot isn't counted, and answers leave no states."""
    policy: Annotated[list[str] | None, _List] = None
    """Policies to compare; `all` is every one of them."""
    seeds: int = 1
    """Replays of each size: the first as recorded, in the others sessions exchange their starts, or
    the gaps between arrivals are shuffled. The table shows means."""
    cost: str = "hybrid-35b-a3b-h200"
    """A shipped cost model or a file."""
    arrivals: Literal["auto", "recorded", "closed"] = "auto"
    """As recorded, or closed: each session goes on its think time after its last answer. By default
    closed where the trace has sessions."""
    predict_answers: bool = True
    """Take an answer to be what the next prompt of its conversation holds in that place."""
    limit: int | None = None
    """Read this many requests."""
    block_size: int | None = None
    """Tokens in a block of the trace, where the lengths leave it open."""
    max_num_seqs: int = 64
    """Most requests that run at once."""
    max_num_batched_tokens: int = 8192
    """Token budget of one step."""
    fleet: Annotated[list[int] | None, _List] = None
    """Numbers of engines that the trace is routed to, each with the memory that is given."""
    prefill_engines: int = 0
    """Of them, those that only prefill; the others go on with what those lend them."""
    routing: Annotated[list[str] | None, _List] = None
    """Ways to route that are compared: round-robin, session (a conversation stays), events (as
    vllm-router by what engines publish), prefix (as milepost.ray). By default the first three."""
    transfer_gb_s: float = 50.0
    """GB that an engine reads from others in a second."""
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """Write all rows to this file; `-` is standard output, in place of the table."""
    plot: Path | None = None
    """Write a picture of the hit rate and the p90 time to first token over memory."""

    def __post_init__(self) -> None:
        check_fleet(self)
        positive = {"num-slots": self.num_slots or [], "kv-tokens": self.kv_tokens or []}
        positive |= {"seeds": [self.seeds], "max-num-seqs": [self.max_num_seqs]}
        for name, values in positive.items():
            if any(value < 1 for value in values):
                raise InvalidRequestError(f"--{name} {values}: use 1 or more")
        if any(gib <= 0 for gib in self.gib or []):
            raise InvalidRequestError(f"--gib {self.gib}: use more than 0")
        sizes = [self.gib, self.num_slots or self.kv_tokens, self.target_hit_rate]
        if sum(size is not None for size in sizes) > 1:
            raise InvalidRequestError(
                "--gib, --num-slots with --kv-tokens, --target-hit-rate: use one of them"
            )
        if self.target_hit_rate is not None and not 0 < self.target_hit_rate < 100:
            raise InvalidRequestError(
                f"--target-hit-rate {self.target_hit_rate:g}: use per cent, above 0 and below 100"
            )

        if self.disk_gib and not self.host_gib:
            raise InvalidRequestError("--disk-gib: give --host-gib, which copies go through")
        if self.host_gib and not self.has_time:
            raise InvalidRequestError("--host-gib: give --gib, the memory of the device")
        if min(self.host_gib, self.disk_gib) < 0 or min(self.host_gb_s, self.disk_gb_s) <= 0:
            raise InvalidRequestError("--host-gib, --disk-gib, --host-gb-s, --disk-gb-s: below 0")

    @property
    def tiers(self) -> TierSizes | None:
        """Beyond the device's memory."""
        if not self.host_gib:
            return None
        return TierSizes(
            host_bytes=int(self.host_gib * GIB),
            disk_bytes=int(self.disk_gib * GIB),
            host_bytes_per_s=self.host_gb_s * 1e9,
            disk_bytes_per_s=self.disk_gb_s * 1e9,
        )

    @property
    def has_time(self) -> bool:
        """Whether KV is limited, and so time passes."""
        return bool(self.gib or self.kv_tokens or self.target_hit_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay."""

    policy: CachePolicy | Pooled
    seed: int
    gib: float | None = None
    num_slots: int = 0
    kv_tokens: int | None = None
    """Without this and GiB, slots alone are limited."""

    def __str__(self) -> str:
        size = f"{self.num_slots} slots" if self.gib is None else f"{self.gib:g} GiB"
        return f"{self.policy.name}, {size}"

    def sizes(self, cost: CostModel, page_size: int, max_num_seqs: int) -> tuple[int, int]:
        """Pages and slots, as two pools have them."""
        if self.gib is not None:
            return cost.split(int(self.gib * GIB), page_size, max_num_seqs)
        assert self.kv_tokens is not None
        return -(-self.kv_tokens // page_size), self.num_slots


def simulate_command(screen: Screen) -> Callable[..., None]:
    """The command, bound to a terminal."""

    def simulate(trace: Path, *, settings: Settings | None = None) -> None:
        """Replay a request trace, and show what each policy reuses with each size of memory.

        Parameters
        ----------
        trace
            JSON lines, plain or gzip; docs/simulator.md says which fields.
        """
        settings = settings or Settings()
        policies = _policies(settings)
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
            from milepost.cli.plot import draw

            draw(means(rows), settings.plot, bound)

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
    """Of each policy the rows of the smallest memory that reaches the target, or of the largest
    that was tried.
    """
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
    return run_row(
        trace,
        policy.name,
        run,
        bound,
        num_pages=num_pages,
        num_slots=num_slots,
        host_gib=settings.host_gib,
        disk_gib=settings.disk_gib,
        gib=cell.gib or cost.bytes_of(num_pages, num_slots, page_size) / GIB,
        seed=cell.seed,
    )


def _is_closed(trace: Trace, settings: Settings) -> bool:
    if settings.arrivals == "auto":
        return any(request.session is not None for request in trace.requests)
    return settings.arrivals == "closed"


@contextmanager
def _progress(screen: Screen, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not screen.reports.is_terminal:
        yield lambda _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen.reports, transient=True
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


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
