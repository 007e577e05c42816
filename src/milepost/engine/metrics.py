"""The engine's metrics under vLLM's names, with the prefix `milepost:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from milepost.scheduler.scheduler import Scheduler
from milepost.scheduler.stats import STEP_BOUNDS, SchedulerStats

LOAD_SOURCES = ("host", "disk", "remote")
EVICTION_CAUSES = ("slots", "pages", "taken", "reset")
"""Labels that have a series from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value; `labels` tell apart those of one name."""

    name: str
    value: float
    """The sum of the values that a histogram has counted."""
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    labels: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    """How many of a histogram's values are at most each upper bound, in ascending order."""


def collect(scheduler: Scheduler) -> list[Metric]:
    """Yields the current value of every metric. Counters count from the engine's start."""
    return [
        *_cache_counters(scheduler),
        *_step_counters(scheduler.stats),
        *_gauges(scheduler),
        _step_sizes(scheduler.stats),
    ]


def _cache_counters(scheduler: Scheduler) -> Iterator[Metric]:
    stats, has_sources = scheduler.cache.stats, scheduler.outside.has_sources
    num_local_hits = stats.hits - sum(stats.loaded.values())
    counters = {
        "prefix_cache_queries": stats.queries,
        "prefix_cache_hits": stats.hits,
        "prefix_cache_local_hits": num_local_hits,
        "external_prefix_cache_queries": (stats.queries - num_local_hits) * has_sources,
        "external_prefix_cache_hits": stats.hits - num_local_hits,
        "image_tokens": stats.image_tokens,
        "image_tokens_reused": stats.image_tokens_reused,
        "images_reused": stats.images_reused,
        "resumed_tokens": stats.resumed_tokens,
        "resumed_hits": stats.resumed_hits,
        "checkpoints_made": stats.checkpoints_made,
        "checkpoints_used": stats.checkpoints_used,
        "checkpoints_skipped": stats.checkpoints_skipped,
        "checkpoints_declined": stats.checkpoints_declined,
        "checkpoints_evicted_unused": stats.checkpoints_evicted_unused,
        "pages_evicted": stats.pages_evicted,
        "pages_duplicate": stats.pages_duplicate,
    }
    yield from (_counter(name, value) for name, value in counters.items())
    lost = {reason.value: value for reason, value in stats.lost.items()}
    loaded = {**dict.fromkeys(LOAD_SOURCES, 0), **stats.loaded}
    evicted = {**dict.fromkeys(EVICTION_CAUSES, 0), **stats.checkpoints_evicted}
    yield from _by_label("prefix_cache_lost_tokens", "reason", lost)
    yield from _by_label("prefix_cache_loaded_tokens", "source", loaded)
    yield from _by_label("checkpoints_evicted", "cause", evicted)


def _step_counters(steps: SchedulerStats) -> Iterator[Metric]:
    counters = {
        "prompt_tokens_computed": steps.prefill_tokens,
        "decode_tokens": steps.decode_tokens,
        "num_steps": steps.num_steps,
        "num_preemptions": steps.num_preemptions,
        "prefix_waits": steps.num_waits,
        "images_encoded": steps.num_encoded,
        "image_encoder_tokens": steps.encoded_tokens,
        "image_encoder_hits": steps.num_encoder_hits,
        "spec_decode_num_drafts": steps.num_drafts,
        "spec_decode_num_draft_tokens": steps.num_draft_tokens,
        "spec_decode_num_accepted_tokens": steps.num_accepted_tokens,
    }
    yield from (_counter(name, value) for name, value in counters.items())
    refused = {"arrival": steps.num_refused_early, "waiting": steps.num_ended_late}
    accepted = {str(place): num for place, num in enumerate(steps.num_accepted_by_position)}
    yield from _by_label("queue_wait_refused", "when", refused)
    yield from _by_label("spec_decode_num_accepted_tokens_per_pos", "position", accepted)


def _gauges(scheduler: Scheduler) -> Iterator[Metric]:
    cache, waiting = scheduler.cache, scheduler.waiting
    num_deferred = sum(
        request.awaits is not None or request.held_until_s is not None for request in waiting
    )
    gauges: dict[str, float] = {
        # Without the one that canonicalises an answer: nobody asked for it.
        "num_requests_running": sum(request.max_tokens > 0 for request in scheduler.running),
        "num_requests_waiting": len(waiting),
    }
    for name, pool in (("kv_cache", cache.pages), ("state_cache", cache.slots)):
        capacity = max(pool.capacity, 1)  # no slots where states lie beside pages
        gauges[f"{name}_usage_perc"] = pool.num_used / capacity
        gauges[f"{name}_cached_perc"] = pool.num_cached / capacity
    yield from (_gauge(name, value) for name, value in gauges.items())
    reasons = {"capacity": len(waiting) - num_deferred, "deferred": num_deferred}
    for reason, num in reasons.items():
        yield _gauge("num_requests_waiting_by_reason", num, reason=reason)


def _step_sizes(steps: SchedulerStats) -> Metric:
    """Returns the histogram of the tokens that a step has computed, by vLLM's bounds."""
    bounds = [*map(str, map(float, STEP_BOUNDS)), "+Inf"]
    counts = accumulate(steps.num_steps_by_tokens)
    return Metric(
        name="milepost:iteration_tokens_total",
        value=steps.num_computed_tokens,
        kind="histogram",
        buckets=dict(zip(bounds, counts, strict=True)),
    )


def _by_label(name: str, label: str, values: Mapping[str, float]) -> Iterator[Metric]:
    for key, value in values.items():
        yield _counter(name, value, **{label: key})


def _counter(name: str, value: float, **labels: str) -> Metric:
    return Metric(name=f"milepost:{name}", value=value, labels=labels)


def _gauge(name: str, value: float, **labels: str) -> Metric:
    return Metric(name=f"milepost:{name}", value=value, kind="gauge", labels=labels)
