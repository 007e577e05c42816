"""`milepost simulate --fleet`: replays a trace on many engines, once for each routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product

from rich.table import Table

from milepost.cli.display import seconds
from milepost.cli.simulate_results import plain_table
from milepost.cli.simulate_settings import GIB, Settings
from milepost.scheduler.memory import PrefixMemory
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet import Fleet, Shape
from milepost.simulator.policies import CachePolicy, Pooled
from milepost.simulator.results import FleetRow, MemoryGib, fleet_row
from milepost.simulator.seeds import reseeded
from milepost.simulator.trace import Trace

DEFAULT_ROUTINGS = ["round-robin", "session", "events"]


def run_fleet(
    trace: Trace,
    settings: Settings,
    cost: CostModel,
    bound: float,
    *,
    closed: bool,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> Iterable[FleetRow]:
    """Yields a row for each size, routing, policy and seed."""
    cells = product(
        settings.fleet or (),
        settings.sizes,
        settings.policies,
        settings.routing or DEFAULT_ROUTINGS,
        range(settings.seeds),
    )
    for num_engines, gib, policy, routing, seed in cells:
        shape = Shape(
            num_engines=num_engines,
            num_prefill=settings.prefill_engines,
            limits=settings.limits,
            bytes_per_s=settings.transfer_gb_s * 1e9,
        )
        seeded = reseeded(trace, seed)
        fleet = Fleet(
            seeded,
            _maker(policy, gib, cost, trace.page_size, settings.max_num_seqs),
            cost,
            shape,
            routing=routing,
            closed=closed,
            tiers=settings.tiers,
            patience=settings.patience,
        )
        with progress(f"{num_engines} x {routing}", len(trace.requests)) as advance:
            run = fleet.run(advance)
        memory = MemoryGib(device=gib, host=settings.host_gib, disk=settings.disk_gib)
        yield fleet_row(
            seeded,
            policy.name,
            run,
            bound,
            shape=shape,
            routing=routing,
            memory=memory,
            seed=seed,
        )


def _maker(
    policy: CachePolicy | Pooled, gib: float, cost: CostModel, page_size: int, max_num_seqs: int
) -> Callable[[], PrefixMemory]:
    num_pages, num_slots = cost.split(int(gib * GIB), page_size, max_num_seqs)
    return lambda: policy.memory(
        cost, num_pages=num_pages, num_slots=num_slots, page_size=page_size
    )


def fleet_table(rows: Sequence[FleetRow]) -> Table:
    """Shows hit rates, times to first token, and how evenly the engines are loaded."""
    names = ["routing", "engines", "GiB", "hit %", "ttft p50", "p90", "p99", "GPU h", "saved"]
    names += ["busiest"]
    has_pools = any(row.prefill_engines for row in rows)
    table = plain_table(names + (["moved"] if has_pools else []), ("routing",))
    for row in rows:
        pools = f"{row.prefill_engines}+{row.engines - row.prefill_engines}"
        times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
        cells = [pools if row.prefill_engines else f"{row.engines}", f"{row.gib:g}"]
        cells += [f"{100 * row.hit_rate:.2f}"]
        cells += ["-" if time is None else seconds(time) for time in times]
        cells += [f"{row.gpu_hours:.2f}", f"{row.gpu_hours_saved:.2f}", f"{row.busiest:.2f}"]
        cells += [f"{row.moved_bytes / 1e9:.0f} GB"] if has_pools else []
        table.add_row(row.routing, *cells)
    return table
