"""Summarises the results of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from milepost.load.client import RequestResult

PERCENTILES = (50, 90, 99)


def summarize(results: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Returns one JSON row: counts, rates, latencies in milliseconds, and the tokens that came from
    the cache.

    None stands for a number missing from the server's report.
    """
    good = [result for result in results if result.is_complete]
    prompt = _total(result.usage.get("prompt_tokens") for result in good)
    cached = _total(_cached(result) for result in good)
    completion = _total(result.usage.get("completion_tokens") for result in good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": sorted({result.error for result in results if result.error})[:5],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompt, 4) if prompt and cached is not None else None,
        "completion_tokens": completion,
        "output_tokens_per_s": None if completion is None else round(completion / seconds, 2),
        "ttft_ms": percentiles([r.first - r.start for r in good if r.first is not None]),
        "tpot_ms": percentiles([t for r in good if (t := _per_token(r)) is not None]),
        "itl_ms": percentiles([b - a for r in good for a, b in pairwise(r.arrivals)]),
        "e2e_ms": percentiles([r.end - r.start for r in good]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns p50, p90, p99 (nearest rank) and the mean in milliseconds; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    found = {f"p{p}": round(1000 * ordered[round(p / 100 * last)], 3) for p in PERCENTILES}
    return {**found, "mean": round(1000 * sum(ordered) / len(ordered), 3)}


def _total(counts: Iterable[Any]) -> int | None:
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _cached(result: RequestResult) -> int | None:
    details = result.usage.get("prompt_tokens_details")
    return details.get("cached_tokens") if isinstance(details, dict) else None


def _per_token(result: RequestResult) -> float | None:
    """Returns an answer's mean time per token, without the first token."""
    num_tokens = result.usage.get("completion_tokens")
    if not isinstance(num_tokens, int) or num_tokens < 2 or result.first is None:
        return None
    return (result.arrivals[-1] - result.first) / (num_tokens - 1)
