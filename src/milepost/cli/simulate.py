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
from milepost.simulator.policies import POLICIES, Policy
from milepost.simulator.results import Row, run_row, slots_row
from milepost.simulator.slots import replay
from milepost.simulator.trace import Trace, read_trace

COMPARED = ["auto", "forks-cap2", "ends", "interval-cap3", "interval"]
_List = Parameter(negative_iterable=(), consume_multiple=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every replay of one command has in common."""

    cost: CostModel
    closed: bool
    max_num_seqs: int
    max_num_batched_tokens: int


def simulate_command(screen: Screen) -> Callable[..., None]:
    """The command, bound to a terminal."""

    def simulate(
        trace: Path,
        *,
        num_slots: Annotated[list[int] | None, _List] = None,
        kv_tokens: Annotated[list[int] | None, _List] = None,
        policy: Annotated[list[str] | None, _List] = None,
        cost: str = "hybrid-35b-a3b-h200",
        arrivals: Literal["auto", "recorded", "closed"] = "auto",
        predict_answers: bool = True,
        limit: int | None = None,
        block_size: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
        plot: Path | None = None,
    ) -> None:
        """Replay a request trace, and show what each policy reuses with each size of memory.

        Parameters
        ----------
        trace
            JSON lines, plain or gzip; docs/simulator.md says which fields.
        num_slots
            Sizes of the slot pool (default 64 128 256 512).
        kv_tokens
            Sizes of the page pool in tokens. Without it KV is unlimited, time stands still, a
            running request's slot isn't counted, and answers leave no states.
        policy
            Policies to compare; `all` is every one of them.
        cost
            A shipped cost model or a file.
        arrivals
            As recorded, or closed: each session goes on its think time after its last answer. By
            default closed where the trace has sessions.
        predict_answers
            Take an answer to be what the next prompt of its conversation holds in that place.
        limit
            Read this many requests.
        block_size
            Tokens in a block of the trace, where the lengths leave it open.
        max_num_seqs
            Most requests that run at once.
        max_num_batched_tokens
            Token budget of one step.
        json
            Write all rows to this file; `-` is standard output, in place of the table.
        plot
            Write a picture of the hit rate and the p90 time to first token over memory.
        """
        policies = _policies(policy or COMPARED)
        sizes = num_slots or [64, 128, 256, 512]
        for name, values in (("--num-slots", sizes), ("--kv-tokens", kv_tokens or [])):
            if any(value < 1 for value in values):
                raise InvalidRequestError(f"{name} {values}: use 1 or more")
        with screen.waiting(f"reading {trace}"):
            read = read_trace(trace, block_size=block_size, limit=limit)
            if predict_answers and kv_tokens:
                read.link_answers()
            bound = read.bound()
        has_sessions = any(request.session is not None for request in read.requests)
        machine = Machine(
            cost=read_cost(cost),
            closed=has_sessions if arrivals == "auto" else arrivals == "closed",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        cells = [
            (p, slots, tokens)
            for tokens in kv_tokens or [None]
            for slots in sizes
            for p in policies
        ]
        rows = []
        for p, slots, tokens in cells:
            with _progress(screen, f"{p.name}, {slots} slots", len(read.requests)) as advance:
                rows.append(_row(read, p, slots, tokens, machine, bound, advance))
        _write(rows, screen, json, bound)
        if plot is not None:
            from milepost.cli.plot import draw

            draw(rows, plot)

    return simulate


def _policies(names: Sequence[str]) -> list[Policy]:
    if list(names) == ["all"]:
        return list(POLICIES.values())
    for name in names:
        if name not in POLICIES:
            raise InvalidRequestError(f"--policy {name}: use {', '.join(POLICIES)}")
    return [POLICIES[name] for name in names]


def _row(
    trace: Trace,
    policy: Policy,
    num_slots: int,
    kv_tokens: int | None,
    machine: Machine,
    bound: float,
    advance: Callable[[int], None],
) -> Row:
    if kv_tokens is None:
        cache = replay(trace, num_slots, policy=policy, on_request=advance)
        return slots_row(trace, policy.name, cache, bound)
    cache = policy.cache(
        num_pages=-(-kv_tokens // trace.page_size), num_slots=num_slots, page_size=trace.page_size
    )
    run = Replay(
        trace,
        cache,
        machine.cost,
        closed=machine.closed,
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=machine.max_num_batched_tokens,
    ).run(advance)
    return run_row(trace, policy.name, run, bound)


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
    console.print(_table(rows))
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
