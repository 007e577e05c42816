"""Attributes of a request's span.

Names are OpenTelemetry's for generative models (`gen_ai.*`), beside vLLM's older ones where these
differ; the cache report is under `milepost.cache`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.engine.processes import Report
from milepost.sampling_params import SamplingParams
from milepost.server.observers import RequestTally


def request_attributes(model: str, params: SamplingParams, tally: RequestTally) -> dict[str, Any]:
    """Returns the attributes of a request whose answers have ended, or were given up."""
    num_tokens = sum(tally.num_tokens)
    found = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.prompt_tokens": tally.num_prompt_tokens,
        "gen_ai.usage.input_tokens": tally.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(one.reused for one in tally.reports),
        "gen_ai.usage.num_sequences": len(tally.num_tokens),
        "gen_ai.response.finish_reasons": tuple(tally.ended.values()) or None,
        "milepost.drafts.verified": tally.num_draft_tokens or None,
        "milepost.drafts.accepted": tally.num_accepted_tokens if tally.num_draft_tokens else None,
        **_latencies(tally),
        **cache_attributes(tally.reports),
    }
    return {name: value for name, value in found.items() if value is not None}


def _latencies(tally: RequestTally) -> dict[str, float]:
    """Returns the times that are known, in seconds."""
    arrival, admitted, first, last = tally.arrival, tally.admitted_at, tally.first_at, tally.now
    found = {}
    if admitted is not None:
        found["gen_ai.latency.time_in_queue"] = admitted - arrival
        found["gen_ai.latency.time_in_model_inference"] = last - admitted
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - arrival
        found["gen_ai.latency.time_in_model_decode"] = last - first
        found["gen_ai.latency.e2e"] = last - arrival
    if admitted is not None and first is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first - admitted
    return {name: max(seconds, 0.0) for name, seconds in found.items()}


def cache_attributes(reports: Sequence[Report]) -> dict[str, int]:
    """Returns the cache reports of a request's prompts, added up."""
    if not reports:
        return {}
    return {
        "milepost.cache.prompt_tokens": sum(one.prompt_tokens for one in reports),
        "milepost.cache.reused": sum(one.reused for one in reports),
        "milepost.cache.kv_length": sum(one.kv_length for one in reports),
        "milepost.cache.state_length": sum(one.state_length for one in reports),
        **_summed("milepost.cache.lost", [one.lost for one in reports]),
        **_summed("milepost.cache.loaded", [one.loaded for one in reports]),
    }


def _summed(prefix: str, counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter[str]())
    return {f"{prefix}.{name}": number for name, number in total.items()}
