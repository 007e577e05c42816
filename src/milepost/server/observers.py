"""The two observers of a request's life: its counts, and its metrics.

Both are told of each output (`received`), of what it adds to choices (`extended`), and of the end
(`closed`), the counts first: the metrics read them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from milepost.cache import CacheReport
from milepost.engine.processes import Delta, Output, Report
from milepost.engine.prompts import Prompt
from milepost.sampling_params import SamplingParams
from milepost.server.metrics import RequestMetrics


class RequestTally:
    """Counts and times of one request: its usage, and at the end its record for the access log."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        arrival: float,
        record: dict[str, Any],
    ) -> None:
        self.arrival = arrival
        self.record = record
        self.reports: list[Report] = []
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.num_tokens = [0] * (len(prompts) * params.n)
        """Number of tokens of each choice."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.ended: dict[int, str] = {}
        """Maps a choice that has ended to its finish reason."""
        self.problem = ""
        """The engine's reason for not continuing a choice."""
        self.now = arrival
        """Time of the last output."""
        self.is_first = False
        """Whether the last output was the first."""
        self.gap_s: float | None = None
        """Seconds between the last output and the one before for the same prompt, if any."""
        self._last_at: list[float | None] = [None] * len(prompts)
        """Time of each prompt's last output."""
        self.admitted_at: float | None = None
        self.first_at: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all choices have ended."""
        return len(self.ended) == len(self.num_tokens)

    def received(self, number: int, output: Output) -> None:
        """Keeps the cache report and the time."""
        self.now = now = time.monotonic()
        if output.report is not None:
            self.reports.append(output.report)
            self.admitted_at = min(output.report.admitted_at, self.admitted_at or now)
        self.is_first = self.first_at is None
        if self.first_at is None:
            self.first_at = now
        before = self._last_at[number]
        self.gap_s = None if before is None else now - before
        self._last_at[number] = now

    def extended(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        """Counts tokens and drafts, and notes ends."""
        for index, delta in deltas:
            self.num_tokens[index] += len(delta.token_ids)
            if delta.num_draft_tokens:
                self.num_draft_tokens += delta.num_draft_tokens
                self.num_accepted_tokens += delta.num_accepted_tokens
            if delta.finish_reason is not None:
                self.ended[index] = delta.finish_reason
                if delta.finish_reason == "error":
                    self.problem = str(delta.stop_reason)

    def closed(self) -> None:
        """Adds the counts to the record."""
        self.record.update(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(self.num_tokens),
            finish_reasons=[self.ended.get(index) for index in range(len(self.num_tokens))],
            **self._cache(),
        )
        if self.first_at is not None:
            self.record["ttft_s"] = round(self.first_at - self.arrival, 4)

    def _cache(self) -> dict[str, Any]:
        """Returns how many prompt tokens were cached, lost and loaded, with reasons and sources."""
        loaded = _sums(report.cache.loaded for report in self.reports)
        return {
            "cached_tokens": sum(report.cache.reused for report in self.reports),
            "lost_tokens": _sums(report.cache.lost for report in self.reports),
            **({"loaded_tokens": loaded} if loaded else {}),
            **_images(self.reports),
        }

    def usage(self, *, is_counted: bool) -> dict[str, Any]:
        """Returns the `usage` of the response so far, with the answers if it `is_counted`."""
        completion = sum(self.num_tokens) if is_counted else 0
        prompt, drafts = self.num_prompt_tokens, {}
        if self.num_draft_tokens:
            drafts["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_draft_tokens - self.num_accepted_tokens,
            }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": self._cache(),
            **drafts,
        }


class MetricsObserver:
    """Observes one request in the server's metrics."""

    def __init__(
        self, metrics: RequestMetrics, params: SamplingParams, tally: RequestTally
    ) -> None:
        self._metrics, self._tally = metrics, tally
        metrics.prompt_tokens.inc(tally.num_prompt_tokens)
        metrics.asked_answers.observe(params.n)
        if params.max_tokens is not None:
            metrics.asked_tokens.observe(params.max_tokens)

    def received(self, output: Output) -> None:
        """Observes what is known once a prompt is admitted, and the time between outputs."""
        metrics, tally = self._metrics, self._tally
        if output.report is not None:
            metrics.queue_time.observe(max(output.report.admitted_at - tally.arrival, 0.0))
            metrics.cached_tokens.inc(output.report.cache.reused)
            self._count_sources(output.report.cache)
        if tally.gap_s is not None:
            metrics.inter_token.observe(tally.gap_s)
        elif tally.is_first:
            metrics.time_to_first_token.observe(tally.now - tally.arrival)

    def _count_sources(self, report: CacheReport) -> None:
        """Counts a prompt's tokens by where they came from."""
        num_loaded = sum(report.loaded.values())
        counts = {
            "local_compute": report.prompt_tokens - report.reused,
            "local_cache_hit": report.reused - num_loaded,
            "external_kv_transfer": num_loaded,
        }
        for source, num_tokens in counts.items():
            self._metrics.prompt_sources[source].inc(num_tokens)

    def extended(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        """Counts tokens and ends."""
        for _, delta in deltas:
            self._metrics.generation_tokens.inc(len(delta.token_ids))
            if delta.finish_reason is not None:
                self._metrics.requests.labels(delta.finish_reason).inc()

    def closed(self) -> None:
        """Observes the whole request."""
        metrics, tally = self._metrics, self._tally
        metrics.prompt_lengths.observe(tally.num_prompt_tokens)
        if tally.record.get("client_gone"):
            metrics.disconnects.inc()
        if tally.is_whole:
            metrics.end_to_end.observe(time.monotonic() - tally.arrival)
            num_reused = sum(report.cache.reused for report in tally.reports)
            metrics.computed_lengths.observe(tally.num_prompt_tokens - num_reused)
            for count in tally.num_tokens:
                metrics.answer_lengths.observe(count)
            self._observe_phases()
        metrics.requests.labels("abort").inc(len(tally.num_tokens) - len(tally.ended))

    def _observe_phases(self) -> None:
        """Observes the phases of a request whose choices have all ended."""
        metrics, tally, longest = self._metrics, self._tally, max(self._tally.num_tokens)
        metrics.longest_answers.observe(longest)
        if tally.first_at is None:
            return
        if longest > 1:
            metrics.time_per_output_token.observe((tally.now - tally.first_at) / (longest - 1))
        metrics.decode_time.observe(tally.now - tally.first_at)
        if tally.admitted_at is not None:
            metrics.prefill_time.observe(max(tally.first_at - tally.admitted_at, 0.0))
            metrics.inference_time.observe(max(tally.now - tally.admitted_at, 0.0))


def _sums(counts: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    """Returns the sums of several counts by name, without those that are 0."""
    return dict(sum(map(Counter, counts), Counter[str]()))


def _images(reports: Sequence[Report]) -> dict[str, int]:
    """Returns how many prompt tokens are of images and were reused, and how many images needed no
    encoder; nothing for prompts without images."""
    found = [report.cache for report in reports if report.cache.images]
    if not found:
        return {}
    return {
        "image_tokens": sum(report.image_tokens for report in found),
        "image_tokens_reused": sum(report.image_tokens_reused for report in found),
        "images_reused": sum(report.images_reused for report in found),
    }
