"""The report of a run: one row for each policy and size of memory, or routing of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar

from milepost.simulator.fleet import FleetRun
from milepost.simulator.trace import Trace

AnyRow = TypeVar("AnyRow", bound="Row")

_SETTING = ("engines", "prefill_engines", "gib", "policy", "routing")
"""Fields that rows of different seeds share."""

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
class Row:
    """One run of a trace, by one engine or many."""

    trace: str
    policy: str
    seed: int = 0
    gib: float
    """Memory of each device for KV and states together."""
    host_gib: float = 0.0
    disk_gib: float = 0.0
    requests: int
    queries: int
    """Prompt tokens, each request once."""
    hits: int
    hit_rate: float
    share_of_bound: float
    """Hits relative to those with a state at every page and unlimited KV."""
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    gpu_hours: float
    """Time in which steps ran, of all engines."""
    gpu_hours_saved: float
    """Time that prefilling the hits would have taken besides."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow(Row):
    """A run of one engine. Lost tokens and hits add up to the queries."""

    num_slots: int
    num_pages: int
    loaded: dict[str, int]
    """Hits that came from host memory or a disk, by source."""
    lost: dict[str, int]
    prefill_tokens: int
    checkpoints_made: int
    checkpoints_used: int
    checkpoints_evicted_unused: int
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow(Row):
    """A run of many engines with one routing."""

    routing: str
    engines: int
    prefill_engines: int
    moved_bytes: int
    """Bytes that engines read from each other."""
    busiest: float
    """Time of the busiest engine's steps relative to the mean."""


def run_row(
    trace: Trace,
    policy: str,
    run: FleetRun,
    bound: float,
    *,
    num_pages: int,
    num_slots: int,
    memory: MemoryGib,
    seed: int = 0,
) -> ResultRow:
    """Makes the row of one engine's run; the numbers of pages and slots are those of two pools.
    `bound` is the share of the prompts that a state at every page and unlimited KV would reuse."""
    stats, cached = run.only.scheduler.stats, run.only.cache.stats
    lost = {reason.value: count for reason, count in cached.lost.items() if count}
    return ResultRow(
        **common_fields(trace, policy, run, bound, memory, seed),
        num_slots=num_slots,
        num_pages=num_pages,
        loaded=dict(cached.loaded),
        lost=lost | ({REFUSED: run.refused_tokens} if run.refused_tokens else {}),
        prefill_tokens=stats.prefill_tokens,
        checkpoints_made=cached.checkpoints_made,
        checkpoints_used=cached.checkpoints_used,
        checkpoints_evicted_unused=cached.checkpoints_evicted_unused,
        preemptions=stats.num_preemptions,
    )


def common_fields(
    trace: Trace, policy: str, run: FleetRun, bound: float, memory: MemoryGib, seed: int
) -> dict[str, Any]:
    """Returns the fields of all rows; `memory` is that of each engine, `bound` as for `run_row`."""
    p50, p90, p99 = (percentile(run.ttft_s, share) for share in (0.5, 0.9, 0.99))
    rate = run.hits / run.queries if run.queries else 0.0
    return {
        "trace": trace.name,
        "policy": policy,
        "seed": seed,
        "gib": memory.device,
        "host_gib": memory.host,
        "disk_gib": memory.disk,
        "requests": len(trace.requests),
        "queries": run.queries,
        "hits": run.hits,
        "hit_rate": rate,
        "share_of_bound": rate / bound if bound else 0.0,
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
        "ttft_p99_s": p99,
        "gpu_hours": run.busy_s / 3600,
        "gpu_hours_saved": run.saved_s / 3600,
        "refused": run.num_refused,
        "asked": run.asked.num_asked,
        "good": run.asked.num_within(GOOD_S),
        "retries": run.asked.num_retries,
        "queue_refusals": run.asked.num_refusals,
        "given_up": run.asked.num_given_up,
        "virtual_s": run.end_s,
    }


def means(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Returns one row for each setting: means over the seeds, counts rounded."""
    groups: dict[tuple[object, ...], list[AnyRow]] = {}
    for row in rows:
        setting = tuple(getattr(row, name, None) for name in _SETTING)
        groups.setdefault(setting, []).append(row)
    return [_mean(group) for group in groups.values()]


def _mean(group: Sequence[AnyRow]) -> AnyRow:
    """Returns the mean of rows that differ only in their seeds."""
    if len(group) == 1:
        return group[0]
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(group[0])):
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
