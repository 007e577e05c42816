"""Logs a line of statistics every ten seconds unless the server is idle, and why short prompts do
not hit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from milepost.engine.metrics import Metric
from milepost.engine.processes import EngineClient, Report
from milepost.errors import MilepostError

logger = logging.getLogger("milepost.stats")

INTERVAL_S = 10.0


class ShortPrompts:
    """Says once why nothing of a prompt under one page came from the cache."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._has_said = False

    def note(self, report: Report) -> None:
        """Logs the reason, if this is the first report of such a prompt."""
        if self._has_said:
            return
        hint = report.cache.hint(self._client.info.page_size)
        if hint is not None and not self._client.config.disable_log_stats:
            self._has_said = True
            logger.info("%s", hint)


async def log_stats(client: EngineClient, interval_s: float = INTERVAL_S) -> None:
    """Logs until it is cancelled or the engine has died."""
    with suppress(MilepostError):
        await _log(client, interval_s)


async def _log(client: EngineClient, interval_s: float) -> None:
    before, since = _values(await client.metrics()), time.monotonic()
    was_idle = True
    while True:
        await asyncio.sleep(interval_s)
        values, now = _values(await client.metrics()), time.monotonic()
        is_idle = values["num_steps"] == before["num_steps"] and not values["num_requests_running"]
        if not (is_idle and was_idle):
            logger.info("%s", line(before, values, now - since))
        before, since, was_idle = values, now, is_idle


def line(before: Mapping[str, float], values: Mapping[str, float], seconds: float) -> str:
    """Returns the line for the time between two readings."""

    def gained(name: str) -> float:
        return values[name] - before[name]

    queries = gained("prefix_cache_queries")
    hits = 100 * gained("prefix_cache_hits") / queries if queries else 0.0
    return (
        f"Avg prompt throughput: {gained('prompt_tokens_computed') / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {gained('decode_tokens') / seconds:.1f} tokens/s, "
        f"Running: {values['num_requests_running']:.0f} reqs, "
        f"Waiting: {values['num_requests_waiting']:.0f} reqs, "
        f"KV cache usage: {100 * values['kv_cache_usage_perc']:.1f}%, "
        f"State cache usage: {100 * values['state_cache_usage_perc']:.1f}%, "
        f"Prefix cache hit rate: {hits:.1f}%"
    )


def _values(metrics: Sequence[Metric]) -> dict[str, float]:
    return {m.name.removeprefix("milepost:"): m.value for m in metrics if not m.labels}
