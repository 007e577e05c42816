"""The engine's counters and gauges under vLLM's names, with the prefix `milepost:`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from milepost.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value; `labels` tell apart those of one name."""

    name: str
    value: float
    kind: Literal["counter", "gauge"] = "counter"
    labels: dict[str, str] = field(default_factory=dict)


def collect(scheduler: Scheduler) -> list[Metric]:
    """Every metric of this moment. Counters run from the engine's start."""
    cache, steps = scheduler.cache, scheduler.stats
    stats = cache.stats
    counters = {
        "prefix_cache_queries": stats.queries,
        "prefix_cache_hits": stats.hits,
        "prompt_tokens_computed": steps.prefill_tokens,
        "decode_tokens": steps.decode_tokens,
        "num_steps": steps.num_steps,
        "num_preemptions": steps.num_preemptions,
        "prefix_waits": steps.num_waits,
        "resumed_tokens": stats.resumed_tokens,
        "resumed_hits": stats.resumed_hits,
        "checkpoints_made": stats.checkpoints_made,
        "checkpoints_used": stats.checkpoints_used,
        "checkpoints_skipped": stats.checkpoints_skipped,
        "checkpoints_declined": stats.checkpoints_declined,
        "checkpoints_evicted_unused": stats.checkpoints_evicted_unused,
        "pages_evicted": stats.pages_evicted,
        "pages_duplicate": stats.pages_duplicate,
        "spec_decode_num_drafts": steps.num_drafts,
        "spec_decode_num_draft_tokens": steps.num_draft_tokens,
        "spec_decode_num_accepted_tokens": steps.num_accepted_tokens,
    }
    pools = {"kv_cache": cache.pages, "state_cache": cache.slots}
    gauges: dict[str, float] = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
    }
    for name, pool in pools.items():
        capacity = max(pool.capacity, 1)  # no slots where states lie beside pages
        gauges[f"{name}_usage_perc"] = pool.num_used / capacity
        gauges[f"{name}_cached_perc"] = pool.num_cached / capacity
    return [
        *(_counter(name, value) for name, value in counters.items()),
        _counter("queue_wait_refused", steps.num_refused_early, when="arrival"),
        _counter("queue_wait_refused", steps.num_ended_late, when="waiting"),
        *(
            _counter("prefix_cache_lost_tokens", value, reason=reason.value)
            for reason, value in stats.lost.items()
        ),
        *(
            _counter("prefix_cache_loaded_tokens", value, source=source)
            for source, value in stats.loaded.items()
        ),
        *(
            _counter("checkpoints_evicted", value, cause=cause)
            for cause, value in stats.checkpoints_evicted.items()
        ),
        *(
            _counter("spec_decode_num_accepted_tokens_per_pos", value, position=str(place))
            for place, value in enumerate(steps.num_accepted_by_position)
        ),
        *(
            Metric(name=f"milepost:{name}", value=value, kind="gauge")
            for name, value in gauges.items()
        ),
    ]


def _counter(name: str, value: float, **labels: str) -> Metric:
    return Metric(name=f"milepost:{name}", value=value, labels=labels)
