"""The report of a replay: one row for each policy and memory size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar

from milepost.cache import Cache, Stats
from milepost.simulator.loop import Replayed
from milepost.simulator.trace import Trace

Row = TypeVar("Row")

REFUSED = "refused"
"""In place of a reason: the tokens of requests that never ran, for they need more memory than there
is. They are among the queries, or less memory would seem to hit more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGib:
    """How much memory a replay had, by place."""

    device: float | None = None
    """None: not known in GiB."""
    host: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Lost tokens and hits add up to the queries. What a slots-only replay has not is None."""

    trace: str
    policy: str
    seed: int = 0
    num_slots: int
    num_pages: int | None
    """None: KV was not limited."""
    gib: float | None = None
    """Of both together; None likewise."""
    requests: int
    queries: int
    """Prompt tokens, each request once."""
    hits: int
    hit_rate: float
    host_gib: float = 0.0
    disk_gib: float = 0.0
    loaded: dict[str, int]
    """Those of the hits that came from host memory or a disk, by which."""
    share_of_bound: float
    """Of what a state at every page and unlimited KV would reuse."""
    lost: dict[str, int]
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    prefill_tokens: int
    checkpoints_made: int
    checkpoints_used: int
    checkpoints_evicted_unused: int
    preemptions: int = 0
    refused: int = 0
    virtual_s: float | None = None


def slots_row(trace: Trace, policy: str, cache: Cache, bound: float, *, seed: int = 0) -> ResultRow:
    """Of a replay with slots alone limited; its pool has one more, for the running request."""
    return ResultRow(
        seed=seed,
        num_slots=cache.slots.total - 1,
        num_pages=None,
        prefill_tokens=cache.stats.queries - cache.stats.hits,
        **_counts(trace, policy, cache.stats, bound),
    )


def run_row(
    trace: Trace,
    policy: str,
    run: Replayed,
    bound: float,
    *,
    num_pages: int,
    num_slots: int,
    memory: MemoryGib = MemoryGib(),
    seed: int = 0,
) -> ResultRow:
    """Of a replay in virtual time with the memory of so many pages and slots."""
    stats = run.scheduler.stats
    p50, p90, p99 = (percentile(run.ttft_s, share) for share in (0.5, 0.9, 0.99))
    return ResultRow(
        seed=seed,
        num_slots=num_slots,
        num_pages=num_pages,
        gib=memory.device,
        host_gib=memory.host,
        disk_gib=memory.disk,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        prefill_tokens=stats.prefill_tokens,
        preemptions=stats.num_preemptions,
        refused=run.num_refused,
        virtual_s=run.end_s,
        **_counts(trace, policy, run.cache.stats, bound, run.refused_tokens),
    )


def _counts(
    trace: Trace, policy: str, stats: Stats, bound: float, refused_tokens: int = 0
) -> dict[str, Any]:
    queries = stats.queries + refused_tokens
    rate = stats.hits / queries if queries else 0.0
    lost = {reason.value: count for reason, count in stats.lost.items() if count}
    return {
        "trace": trace.name,
        "policy": policy,
        "requests": len(trace.requests),
        "queries": queries,
        "hits": stats.hits,
        "hit_rate": rate,
        "loaded": dict(stats.loaded),
        "share_of_bound": rate / bound if bound else 0.0,
        "lost": lost | ({REFUSED: refused_tokens} if refused_tokens else {}),
        "checkpoints_made": stats.checkpoints_made,
        "checkpoints_used": stats.checkpoints_used,
        "checkpoints_evicted_unused": stats.checkpoints_evicted_unused,
    }


def means(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """One row for each policy and size: means over the seeds, counts rounded."""
    groups: dict[tuple[str, int, int | None], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.num_slots, row.num_pages), []).append(row)
    return [mean_of(group) for group in groups.values()]


def mean_of(group: Sequence[Row]) -> Row:
    """One row of several that differ in their seeds."""
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
    """The smallest value that `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
