"""The engine's metrics under vLLM's names, with the prefix `milepost:`, and their help texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from milepost.scheduler.scheduler import Scheduler
from milepost.scheduler.stats import STEP_BOUNDS, SchedulerStats

LOAD_SOURCES = ("host", "disk", "remote")
EVICTION_CAUSES = ("slots", "pages", "reset")
"""Labels whose series exist from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value; `labels` tell apart those of one name."""

    name: str
    value: float
    """The sum of the values that a histogram has counted."""
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    labels: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    """Maps upper bounds, in ascending order, to the number of the histogram's values up to each."""


def collect(scheduler: Scheduler) -> list[Metric]:
    """Returns the current value of every metric. Counters count from the engine's start."""
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
    cache, waiting = scheduler.outside.cache, scheduler.waiting
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


TEXTS = {
    "checkpoints_declined": "States of prompts that were not kept: what they would displace saves "
    "more.",
    "checkpoints_evicted": "Evicted states by cause: slots or pages were needed, or the cache was "
    "reset.",
    "checkpoints_evicted_unused": "States that were evicted before any request resumed from them.",
    "checkpoints_made": "States that were saved.",
    "checkpoints_skipped": "States that were not saved because there was no slot.",
    "checkpoints_used": "Times that a request resumed from a saved state.",
    "decode_tokens": "Tokens computed by decodes.",
    "external_prefix_cache_hits": "Prompt tokens reused from host memory, disk or another engine.",
    "external_prefix_cache_queries": "Prompt tokens that the device did not have, if there is "
    "anywhere else to look.",
    "image_encoder_hits": "Images of a step whose encoder outputs were still on the device.",
    "image_encoder_tokens": "Tokens of images that the vision encoder computed.",
    "image_tokens": "Prompt tokens of images.",
    "image_tokens_reused": "Prompt tokens of images that were reused.",
    "images_encoded": "Images that the vision encoder computed.",
    "images_reused": "Images all of whose tokens were reused.",
    "iteration_tokens_total": "Tokens computed in a step.",
    "kv_cache_cached_perc": "Share of the pages that only the cache holds.",
    "kv_cache_usage_perc": "Share of the pages that running requests hold.",
    "kv_leases_expired": "Loans to other engines that ended before they were released.",
    "kv_leases_granted": "Prompts lent to other engines.",
    "kv_leases_refused": "Prompts that were not lent, since too much was lent already.",
    "kv_transfer_bytes": "Bytes fetched from other engines.",
    "kv_transfer_failures": "Fetches from other engines that failed.",
    "kv_transfer_read_seconds": "Seconds in which data of other engines was read.",
    "kv_transfer_seconds": "Seconds of all fetches from other engines.",
    "kv_transfers": "Fetches from other engines.",
    "num_preemptions": "Times that a running request lost its pages.",
    "num_requests_running": "Running requests.",
    "num_requests_waiting": "Waiting requests.",
    "num_requests_waiting_by_reason": "Waiting requests: for room, or for something they deferred "
    "to.",
    "num_steps": "Steps of the engine.",
    "pages_duplicate": "Pages that two requests computed at the same time.",
    "pages_evicted": "Evicted pages.",
    "prefix_cache_hits": "Prompt tokens that were reused.",
    "prefix_cache_loaded_tokens": "Prompt tokens that were loaded, by where from.",
    "prefix_cache_local_hits": "Prompt tokens reused from the device.",
    "prefix_cache_lost_tokens": "Prompt tokens that were computed, by the reason.",
    "prefix_cache_queries": "Prompt tokens of admitted requests.",
    "prefix_waits": "Times that a request waited a step for a prefix that another one computes.",
    "prompt_tokens_computed": "Tokens computed by prefills.",
    "queue_wait_refused": "Requests refused on arrival or ended while waiting, since they would "
    "have waited too long.",
    "resumed_hits": "Tokens of preempted requests that were reused on their return.",
    "resumed_tokens": "Tokens of preempted requests on their return.",
    "spec_decode_num_accepted_tokens": "Accepted drafts.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted drafts by their position in the run.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_drafts": "Runs of drafts that were verified.",
    "state_cache_cached_perc": "Share of the state slots that only the cache holds.",
    "state_cache_usage_perc": "Share of the state slots that running requests hold.",
    "tier_disk_rests": "Times that a directory which did not respond was left unused.",
    "tier_failed_loads": "Loads whose data could not all be read.",
    "tier_items": "Pages and states in a tier.",
    "tier_loads": "Loads from host memory or disk.",
    "tier_states_too_late": "States that were evicted before there was room to copy them.",
    "tier_stored_items": "Pages and states copied to host memory.",
    "tier_usage_perc": "Share of a tier's capacity in use.",
    "tier_written_items": "Pages and states written to disk.",
}
