"""The report of a replay: one row for each policy and memory size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar

from milepost.simulator.clients import Goodput
from milepost.simulator.loop import Replayed
from milepost.simulator.trace import Trace

Row = TypeVar("Row")

REFUSED = "refused"
"""Reason for the tokens of requests that need more memory than there is. They count as queries, or
less memory would seem to hit more.
"""


GOOD_S = 10.0
"""Longest time to first token of an answer that counts as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGib:
    """Memory of a replay, by place."""

    device: float
    host: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One replay. Lost tokens and hits add up to the queries."""

    trace: str
    policy: str
    seed: int = 0
    num_slots: int
    num_pages: int
    gib: float
    """Memory of the device for KV and states together."""
    host_gib: float = 0.0
    disk_gib: float = 0.0
    requests: int
    queries: int
    """Prompt tokens, each request once."""
    hits: int
    hit_rate: float
    loaded: dict[str, int]
    """Hits that came from host memory or a disk, by source."""
    share_of_bound: float
    """Hits relative to those with a state at every page and unlimited KV."""
    lost: dict[str, int]
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    gpu_hours: float
    """Time in which steps ran."""
    gpu_hours_saved: float
    """Time that prefilling the hits would have taken besides."""
    prefill_tokens: int
    checkpoints_made: int
    checkpoints_used: int
    checkpoints_evicted_unused: int
    preemptions: int = 0
    refused: int = 0
    asked: int
    """Requests of the trace that were sent; those of ended sessions are not."""
    good: int
    """Answers whose first token came within `GOOD_S`, retries included."""
    retries: int
    queue_refusals: int
    """Times that a request was refused, or ended, because of its wait for a turn."""
    given_up: int
    """Requests that clients gave up on, after all retries."""
    virtual_s: float


def run_row(
    trace: Trace,
    policy: str,
    run: Replayed,
    bound: float,
    *,
    num_pages: int,
    num_slots: int,
    memory: MemoryGib,
    seed: int = 0,
) -> ResultRow:
    """Makes the row of a replay; the numbers of pages and slots are those of two pools."""
    stats, cached = run.scheduler.stats, run.cache.stats
    p50, p90, p99 = (percentile(run.ttft_s, share) for share in (0.5, 0.9, 0.99))
    queries = cached.queries + run.refused_tokens
    rate = cached.hits / queries if queries else 0.0
    lost = {reason.value: count for reason, count in cached.lost.items() if count}
    return ResultRow(
        trace=trace.name,
        policy=policy,
        seed=seed,
        num_slots=num_slots,
        num_pages=num_pages,
        gib=memory.device,
        host_gib=memory.host,
        disk_gib=memory.disk,
        requests=len(trace.requests),
        queries=queries,
        hits=cached.hits,
        hit_rate=rate,
        loaded=dict(cached.loaded),
        share_of_bound=rate / bound if bound else 0.0,
        lost=lost | ({REFUSED: run.refused_tokens} if run.refused_tokens else {}),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        gpu_hours=run.busy_s / 3600,
        gpu_hours_saved=run.saved_s / 3600,
        prefill_tokens=stats.prefill_tokens,
        checkpoints_made=cached.checkpoints_made,
        checkpoints_used=cached.checkpoints_used,
        checkpoints_evicted_unused=cached.checkpoints_evicted_unused,
        preemptions=stats.num_preemptions,
        refused=run.num_refused,
        virtual_s=run.end_s,
        **counts_of(run.asked),
    )


def counts_of(asked: Goodput) -> dict[str, int]:
    """Returns the fields of a row that count what clients asked and got."""
    return {
        "asked": asked.num_asked,
        "good": asked.num_within(GOOD_S),
        "retries": asked.num_retries,
        "queue_refusals": asked.num_refusals,
        "given_up": asked.num_given_up,
    }


def means(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns one row for each policy and size: means over the seeds, counts rounded."""
    groups: dict[tuple[str, float], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.gib), []).append(row)
    return [mean_of(group) for group in groups.values()]


def mean_of(group: Sequence[Row]) -> Row:
    """Returns the mean of rows that differ only in their seeds."""
    if len(group) == 1:
        return group[0]
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(group[0])):  # type: ignore[arg-type]
        held = [getattr(row, name) for row in group]
        if name in ("lost", "loaded"):
            keys = dict.fromkeys(key for counts in held for key in counts)
            values[name] = {key: round(fmean(each.get(key, 0) for each in held)) for key in keys}
        elif isinstance(held[0], float):
            values[name] = fmean(held)
        elif isinstance(held[0], int):
            values[name] = round(fmean(held))
        else:
            values[name] = held[0]
    return type(group[0])(**values)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
