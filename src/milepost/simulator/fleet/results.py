"""The report of a fleet's run: one row for each routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milepost.simulator.fleet.fleet import FleetRun, Shape
from milepost.simulator.results import MemoryGib, counts_of, mean_of, percentile
from milepost.simulator.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One routing of one fleet."""

    trace: str
    policy: str
    routing: str
    engines: int
    prefill_engines: int
    gib: float
    """Device memory of each engine for KV and states together."""
    host_gib: float
    disk_gib: float
    seed: int
    requests: int
    queries: int
    hits: int
    hit_rate: float
    share_of_bound: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    gpu_hours: float
    """Time in which steps ran, of all engines."""
    gpu_hours_saved: float
    """Time that prefilling the hits would have taken besides."""
    moved_bytes: int
    """Bytes that engines read from each other."""
    busiest: float
    """Time of the busiest engine's steps relative to the mean."""
    refused: int
    asked: int
    good: int
    retries: int
    queue_refusals: int
    given_up: int
    virtual_s: float


def fleet_row(
    trace: Trace,
    run: FleetRun,
    bound: float,
    shape: Shape,
    *,
    policy: str,
    routing: str,
    memory: MemoryGib,
    seed: int,
) -> FleetRow:
    """Makes the row of a run; `memory` is that of each engine, and `bound` the share that a state
    at every page and unlimited KV would reuse."""
    p50, p90, p99 = (percentile(run.ttft_s, share) for share in (0.5, 0.9, 0.99))
    rate = run.hits / run.queries if run.queries else 0.0
    return FleetRow(
        trace=trace.name,
        policy=policy,
        routing=routing,
        engines=shape.num_engines,
        prefill_engines=shape.num_prefill,
        gib=memory.device,
        host_gib=memory.host,
        disk_gib=memory.disk,
        seed=seed,
        requests=len(trace.requests),
        queries=run.queries,
        hits=run.hits,
        hit_rate=rate,
        share_of_bound=rate / bound if bound else 0.0,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        gpu_hours=run.busy_s / 3600,
        gpu_hours_saved=run.saved_s / 3600,
        moved_bytes=run.moved_bytes,
        busiest=run.busiest,
        refused=run.num_refused,
        virtual_s=run.end_s,
        **counts_of(run.asked),
    )


def fleet_means(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """Returns one row for each fleet, policy and routing: means over the seeds."""
    groups: dict[tuple[object, ...], list[FleetRow]] = {}
    for row in rows:
        key = row.engines, row.prefill_engines, row.gib, row.policy, row.routing
        groups.setdefault(key, []).append(row)
    return [mean_of(group) for group in groups.values()]
