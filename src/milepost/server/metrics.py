"""Prometheus metrics: the engine's counters and gauges, and the latencies measured here.

Names are vLLM's where the meaning is the same, with the prefix `milepost:`; `vllm_metrics.py`
adds the labels, and repeats those under vLLM's own prefix. HTTP requests are counted in
`HttpMetrics` there. Memory, CPU time and file descriptors of both processes have the prefixes
`process_` and `milepost_engine_process_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from milepost.engine.metrics import TEXTS, Metric
from milepost.server.vllm_metrics import ExposedMetrics, HttpMetrics

C = TypeVar("C", bound=Collector)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # unused, and they double the number of series

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160,
    320, 640,
)  # fmt: skip
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


ENDS = ("stop", "length", "abort", "error")
"""How answers end; each has a series from the start."""
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Sources of prompt tokens, as vLLM names them: the last are from outside the device."""


class RequestMetrics:
    """The registry of the HTTP server."""

    def __init__(
        self,
        model_name: str,
        *,
        cache_config: Callable[[], Mapping[str, object]],
        is_asleep: Callable[[], bool],
        engine_pid: Callable[[], int | None],
        build: Mapping[str, str],
    ) -> None:
        self._registry = CollectorRegistry()
        """Our metrics, without the labels that all have."""
        self._engine = _Snapshot()
        self._registry.register(self._engine)
        Info("milepost:build", "What runs.", registry=self._registry).info(dict(build))
        self._exposed = CollectorRegistry()
        """All that a scrape returns."""
        ours = ExposedMetrics(self._registry.collect, model_name, cache_config, is_asleep)
        self._exposed.register(ours)
        self.http = HttpMetrics(self._exposed)
        ProcessCollector(registry=self._exposed)
        ProcessCollector("milepost_engine", lambda: engine_pid() or 0, registry=self._exposed)
        PlatformCollector(self._exposed)
        GCCollector(self._exposed)
        seconds, tokens, total = self._seconds, self._tokens, self._total
        self.time_to_first_token = seconds("time_to_first_token", "From arrival to first token.")
        self.inter_token = seconds("inter_token_latency", "Between two deliveries of tokens.")
        self.time_per_output_token = seconds(
            "request_time_per_output_token", "Mean per token after the first."
        )
        self.end_to_end = seconds("e2e_request_latency", "From arrival to last token.")
        self.queue_time = seconds("request_queue_time", "From arrival to admission.")
        self.inference_time = seconds("request_inference_time", "From admission to last token.")
        self.prefill_time = seconds("request_prefill_time", "From admission to first token.")
        self.decode_time = seconds("request_decode_time", "From first token to last token.")
        self.prompt_tokens = total("prompt_tokens", "Prompt tokens of started requests.")
        self.cached_tokens = total("prompt_tokens_cached", "Prompt tokens from the cache.")
        by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where they came from.", ("source",)
        )
        self.prompt_sources = {source: by_source.labels(source) for source in PROMPT_SOURCES}
        self.generation_tokens = total("generation_tokens", "Generated tokens.")
        self.prompt_lengths = tokens("request_prompt_tokens", "Prompt length.")
        self.computed_lengths = tokens(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed."
        )
        self.answer_lengths = tokens("request_generation_tokens", "Answer length.")
        self.longest_answers = tokens(
            "request_max_num_generation_tokens", "Length of a request's longest answer."
        )
        self.asked_answers = tokens("request_params_n", "The parameter n.")
        self.asked_tokens = tokens("request_params_max_tokens", "The parameter max_tokens.")
        self.requests = self._counter(
            "request_success", "Answers by how they ended.", ("finished_reason",)
        )
        for end in ENDS:
            self.requests.labels(end)
        self.refused = self._counter("request_refused", "Requests that got an error.", ("status",))
        self.disconnects = self._counter(
            "request_disconnects", "Requests whose client left or did not read."
        )

    def expose(self, engine: Sequence[Metric]) -> bytes:
        """Returns the text format, with these metrics of the engine."""
        self._engine.metrics = engine
        return generate_latest(self._exposed)

    def _seconds(self, name: str, text: str) -> Distribution:
        return self._added(Distribution(f"milepost:{name}_seconds", text, _SECONDS))

    def _tokens(self, name: str, text: str) -> Distribution:
        return self._added(Distribution(f"milepost:{name}", text, _TOKENS))

    def _total(self, name: str, text: str) -> Total:
        return self._added(Total(f"milepost:{name}", text))

    def _added(self, collector: C) -> C:
        self._registry.register(collector)
        return collector

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"milepost:{name}", text, labels, registry=self._registry)


# --- counted for each token: the library's own metrics take a lock and search a bucket each time --


class Total(Collector):
    """A counter."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._value = 0

    def inc(self, amount: int = 1) -> None:
        self._value += amount

    def collect(self) -> Iterator[Family]:
        yield CounterMetricFamily(self._name, self._text, value=self._value)


class Distribution(Collector):
    """A histogram with these upper bounds, in ascending order."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Family]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, sum_value=self._sum)
        yield family


class _Snapshot(Collector):
    """The engine's metrics in Prometheus' form."""

    def __init__(self) -> None:
        self.metrics: Sequence[Metric] = ()

    def collect(self) -> Iterator[Family]:
        ordered = sorted(self.metrics, key=lambda metric: metric.name)
        for name, group in groupby(ordered, key=lambda metric: metric.name):
            yield _family(name, list(group))


_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(name: str, metrics: list[Metric]) -> Family:
    labels = sorted(metrics[0].labels)
    text = TEXTS.get(name.removeprefix("milepost:"), "")
    family: Any = _FAMILIES[metrics[0].kind](name, text, labels=labels)
    for metric in metrics:
        values = [metric.labels[label] for label in labels]
        if metric.kind == "histogram":
            family.add_metric(values, list(metric.buckets.items()), metric.value)
        else:
            family.add_metric(values, metric.value)
    whole: Family = family
    return whole
