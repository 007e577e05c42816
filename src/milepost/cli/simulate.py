"""`milepost simulate`: replays a request trace through scheduler and cache, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from milepost.cli.display import Screen, seconds
from milepost.errors import InvalidRequestError
from milepost.simulator.cost import CostModel, read_cost
from milepost.simulator.loop import Replay
from milepost.simulator.policies import POLICIES, CachePolicy, Pooled
from milepost.simulator.results import Row, means, run_row, slots_row
from milepost.simulator.seeds import reseeded
from milepost.simulator.slots import replay
from milepost.simulator.trace import Trace, read_trace

COMPARED = ["auto", "forks-cap2", "ends", "interval-cap3", "interval"]
_List = Parameter(negative_iterable=(), consume_multiple=True)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is replayed, and on what. One flag a field."""

    num_slots: Annotated[list[int] | None, _List] = None
    """Sizes of the slot pool (default 64 128 256 512)."""
    kv_tokens: Annotated[list[int] | None, _List] = None
    """Sizes of the page pool in tokens. Without it KV is unlimited, time stands still, a running
    request's slot isn't counted, and answers leave no states."""
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
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """Write all rows to this file; `-` is standard output, in place of the table."""
    plot: Path | None = None
    """Write a picture of the hit rate and the p90 time to first token over memory."""

    def __post_init__(self) -> None:
        positive = {"num-slots": self.num_slots or [], "kv-tokens": self.kv_tokens or []}
        for name, values in (positive | {"seeds": [self.seeds]}).items():
            if any(value < 1 for value in values):
                raise InvalidRequestError(f"--{name} {values}: use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay."""

    policy: CachePolicy | Pooled
    num_slots: int
    kv_tokens: int | None
    seed: int


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
        cells = _cells(settings)
        cost = read_cost(settings.cost)
        with screen.waiting(f"reading {trace}"):
            read = read_trace(trace, block_size=settings.block_size, limit=settings.limit)
            if settings.predict_answers and settings.kv_tokens:
                read.link_answers()
            bound = read.bound()
        rows = []
        for cell in cells:
            label = f"{cell.policy.name}, {cell.num_slots} slots"
            with _progress(screen, label, len(read.requests)) as advance:
                rows.append(_row(reseeded(read, cell.seed), cell, settings, cost, bound, advance))
        _write(rows, screen, settings.json, bound)
        if settings.plot is not None:
            from milepost.cli.plot import draw

            draw(means(rows), settings.plot)

    return simulate


def _cells(settings: Settings) -> list[Cell]:
    policies = _policies(settings.policy or COMPARED, settings.kv_tokens)
    return [
        Cell(policy=policy, num_slots=num_slots, kv_tokens=kv_tokens, seed=seed)
        for kv_tokens in settings.kv_tokens or [None]
        for num_slots in settings.num_slots or [64, 128, 256, 512]
        for policy in policies
        for seed in range(settings.seeds)
    ]


def _policies(names: Sequence[str], kv_tokens: list[int] | None) -> list[CachePolicy | Pooled]:
    if list(names) == ["all"]:
        return [p for p in POLICIES.values() if kv_tokens or isinstance(p, CachePolicy)]
    for name in names:
        if name not in POLICIES:
            raise InvalidRequestError(f"--policy {name}: use {', '.join(POLICIES)}")
        if not kv_tokens and isinstance(POLICIES[name], Pooled):
            raise InvalidRequestError(
                f"--policy {name}: states and KV share its memory; give --kv-tokens too"
            )
    return [POLICIES[name] for name in names]


def _row(
    trace: Trace,
    cell: Cell,
    settings: Settings,
    cost: CostModel,
    bound: float,
    advance: Callable[[int], None],
) -> Row:
    policy, num_slots = cell.policy, cell.num_slots
    if cell.kv_tokens is None:
        assert isinstance(policy, CachePolicy), "pooled policies are refused without KV's size"
        cache = replay(trace, num_slots, policy=policy, on_request=advance)
        return slots_row(trace, policy.name, cache, bound, seed=cell.seed)
    num_pages = -(-cell.kv_tokens // trace.page_size)
    run = Replay(
        trace,
        policy.memory(cost, num_pages=num_pages, num_slots=num_slots, page_size=trace.page_size),
        cost,
        closed=_is_closed(trace, settings),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    ).run(advance)
    return run_row(
        trace,
        policy.name,
        run,
        bound,
        num_pages=num_pages,
        num_slots=num_slots,
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


def _write(rows: list[Row], screen: Screen, path: Path | None, bound: float) -> None:
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    if path is not None and str(path) == "-":
        screen.answers.write(text)
        return
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"--json {path}: {error.strerror}") from error
    width = None if screen.answers.isatty() else 200
    console = Console(file=screen.answers, highlight=False, width=width)
    console.print(_table(means(rows)))
    console.print(f"{rows[0].trace}: {rows[0].requests} requests, bound {100 * bound:.1f} %")


def _table(rows: list[Row]) -> Table:
    has_time = rows[0].num_pages is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = ["policy", "slots", "hit %", "of bound"]
    names += ["pages", "ttft p50", "p90", "p99"] if has_time else []
    names += ["computed", "made", "used", "unused", "lost most to"]
    for name in names:
        is_text = name in ("policy", "lost most to")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != names[-1])
    for row in rows:
        times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
        cells = [row.policy, f"{row.num_slots}", f"{100 * row.hit_rate:.2f}"]
        cells.append(f"{100 * row.share_of_bound:.1f} %")
        if has_time:
            cells.append(f"{row.num_pages}")
            cells += ["-" if time is None else seconds(time) for time in times]
        cells += [f"{row.prefill_tokens / 1e6:.2f} M", f"{row.checkpoints_made}"]
        cells += [f"{row.checkpoints_used}", f"{row.checkpoints_evicted_unused}", _losses(row)]
        table.add_row(*cells)
    return table


def _losses(row: Row) -> str:
    """The three largest, in per cent of the prompt tokens."""
    largest = sorted(row.lost.items(), key=lambda loss: -loss[1])[:3]
    return ", ".join(f"{name} {100 * count / row.queries:.1f}" for name, count in largest)
