"""Exposes metrics as vLLM does, so that its dashboards, routers and autoscalers read them: our own
with its labels and again under its names, and those of HTTP requests.

Of our own nothing is counted twice: each scrape copies our own registry. The labels are
`model_name` and `engine`; metrics with more labels keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

OURS, THEIRS = "milepost:", "vllm:"

SAME = frozenset([
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "kv_cache_usage_perc", "prefix_cache_queries", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "num_preemptions", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "prompt_tokens", "prompt_tokens_cached",
    "prompt_tokens_by_source", "generation_tokens", "iteration_tokens_total", "request_success",
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_prefill_kv_computed_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens",
])  # fmt: skip
"""Names of metrics with the same meaning in both; only the prefix differs."""

NAMES = {**{name: name for name in SAME}, "prefix_cache_local_hits": "prefix_cache_hits"}
"""Our names and theirs, without prefixes. vLLM's hits leave out what came from outside the
device."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class ExposedMetrics(Collector):
    """The metrics that `collect_ours` returns, labelled, under both prefixes."""

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
        families = list(self._collect_ours())
        for family in families:
            yield self._copy(family, family.name)
        for family in families:
            theirs = NAMES.get(family.name.removeprefix(OURS))
            if theirs is not None:
                yield self._copy(family, THEIRS + theirs)
        yield self._cache_info()
        yield self._sleep_state()

    def _copy(self, family: Family, name: str) -> Family:
        copy = Family(name, family.documentation, family.type, family.unit)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            copy.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
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


UNCOUNTED = frozenset(["/metrics", "/health", "/load", "/ping", "/version", "/server_info"])
"""Routes that are polled; vLLM leaves out the same."""

_METHODS = frozenset(["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"])
_FINE_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip
_COARSE_BOUNDS = (0.1, 0.5, 1)
CLIENT_GONE = 499
"""Status of a request whose client left before the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """The metrics of requests with the same labels."""

    requests: Counter
    request_bytes: Summary
    response_bytes: Summary
    seconds: Histogram


class HttpMetrics:
    """Counts finished requests in a registry, under the names of prometheus-fastapi-instrumentator,
    which vLLM uses.

    The gate sees every request with its size, status and time, so these lines do the same without
    that library's middleware. Paths are routes, never what a client wrote; methods are those that
    exist.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series: dict[tuple[str, str, str], _Series] = {}
        """Keyed by method, status and handler: looking up labels takes longer than counting."""
        self._requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=registry
        )
        self._request_bytes = Summary(
            "http_request_size_bytes",
            "Content length of requests, as declared.",
            ("handler",),
            registry=registry,
        )
        self._response_bytes = Summary(
            "http_response_size_bytes",
            "Content length of responses; 0 for streams.",
            ("handler",),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request's headers to the end of its response, by handler.",
            ("method", "handler"),
            buckets=_COARSE_BOUNDS,
            registry=registry,
        )
        self._fine_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "Time from a request's headers to the end of its response.",
            buckets=_FINE_BOUNDS,
            registry=registry,
        )

    def finished(
        self,
        scope: Any,
        *,
        status: int | None,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Counts a request that the application has handled in this scope."""
        handler = getattr(scope.get("route"), "path", "none")
        if handler in UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = method, f"{(status or CLIENT_GONE) // 100}xx", handler
        series = self._series.get(key) or self._series.setdefault(key, self._of(*key))
        series.requests.inc()
        series.request_bytes.observe(request_bytes)
        series.response_bytes.observe(response_bytes)
        series.seconds.observe(seconds)
        self._fine_seconds.observe(seconds)

    def _of(self, method: str, status: str, handler: str) -> _Series:
        return _Series(
            requests=self._requests.labels(method, status, handler),
            request_bytes=self._request_bytes.labels(handler),
            response_bytes=self._response_bytes.labels(handler),
            seconds=self._seconds.labels(method, handler),
        )
