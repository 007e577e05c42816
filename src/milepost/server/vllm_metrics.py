"""Repeats metrics under vLLM's names, so that its dashboards, routers and autoscalers read them.

Nothing is counted twice: each scrape copies our own registry. Labels are vLLM's, `model_name` and
`engine`; metrics with more labels keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

OURS, THEIRS = "milepost:", "vllm:"

NAMES = frozenset([
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "prompt_tokens", "prompt_tokens_cached",
    "generation_tokens", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens",
])  # fmt: skip
"""Names of metrics with the same meaning in both; only the prefix differs."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Mirror(Collector):
    """Copies the metrics that `collect_ours` returns."""

    def __init__(
        self,
        collect_ours: Callable[[], Iterable[Family]],
        model_name: str,
        cache_config: Callable[[], Mapping[str, object]],
        is_asleep: Callable[[], bool],
    ) -> None:
        self._collect_ours = collect_ours
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache_config = cache_config
        self._is_asleep = is_asleep

    def describe(self) -> Iterable[Family]:
        """Returns nothing, so registration checks for no duplicates."""
        return ()

    def collect(self) -> Iterator[Family]:
        for family in self._collect_ours():
            if family.name.removeprefix(OURS) in NAMES:
                yield self._copy(family)
        yield self._cache_info()
        yield self._sleep_state()

    def _copy(self, family: Family) -> Family:
        copy = Family(_theirs(family.name), family.documentation, family.type, family.unit)
        for sample in family.samples:
            labels = {**self._labels, **sample.labels}
            copy.add_sample(_theirs(sample.name), labels, sample.value)
        return copy

    def _cache_info(self) -> Family:
        labels = {name: str(value) for name, value in self._cache_config().items()}
        labels["engine"] = "0"
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the cache.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        return info

    def _sleep_state(self) -> Family:
        states = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the engine's current state; weights are never offloaded.",
            labels=[*self._labels, "sleep_state"],
        )
        for state in SLEEP_STATES:
            value = float(state == "awake" and not self._is_asleep())
            states.add_metric([*self._labels.values(), state], value)
        return states


def _theirs(name: str) -> str:
    return THEIRS + name.removeprefix(OURS)
