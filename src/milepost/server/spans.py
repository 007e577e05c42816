"""Spans of requests, sent to an OpenTelemetry collector as OTLP over HTTP.

A request has one span, from its arrival to the end of its response, and below it `queue`, `load`,
`prefill` and `decode`, made at its end from the times that are known by then: the engine does
nothing for them. Spans wait in a queue of fixed size, and a thread sends them; without a collector
the oldest are dropped, and no request waits.

Names of attributes are OpenTelemetry's for generative models (`gen_ai.*`), beside vLLM's older ones
where these differ; the cache report is under `milepost.cache`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

import milepost
from milepost.cache import CacheReport
from milepost.sampling_params import SamplingParams
from milepost.server.observers import RequestTally
from milepost.server.tracing import TraceContext, parsed

NAME = "llm_request"
"""Name of a request's span, as in vLLM."""
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/invocations": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Paths whose requests have spans, and what OpenTelemetry calls the operation."""
MAX_VALUE_CHARS = 1024
FLUSH_S = 2.0
"""Time for the last spans at the end."""


class Tracing:
    """Makes the spans of one server."""

    def __init__(self, endpoint: str, model: str) -> None:
        self.model = model
        service = Resource({"service.name": "milepost", "service.version": milepost.__version__})
        self._provider = TracerProvider(
            resource=service.merge(OTELResourceDetector().detect()),
            span_limits=SpanLimits(max_span_attribute_length=MAX_VALUE_CHARS),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("milepost", milepost.__version__)

    def begin(
        self, method: str, path: str, arrival: float, context: TraceContext | None
    ) -> RequestSpan | None:
        """Returns the span of a request that arrived at this time of the monotonic clock; None for
        paths without spans."""
        operation = OPERATIONS.get(path) if method == "POST" else None
        if operation is None:
            return None
        return RequestSpan(self._tracer, self.model, operation, arrival, context)

    def close(self) -> None:
        """Sends what is left, for `FLUSH_S` at most."""
        # The library would wait for a collector that does not answer.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            self._exporter.shutdown()  # it tries no more


class RequestSpan:
    """The span of one request, with those below it."""

    def __init__(
        self,
        tracer: Tracer,
        model: str,
        operation: str,
        arrival: float,
        context: TraceContext | None,
    ) -> None:
        self._tracer, self._model = tracer, model
        self._clock_ns = time.time_ns() - int(time.monotonic() * 1e9)
        """The system's time at the beginning of the monotonic clock."""
        self._span: Span = tracer.start_span(
            NAME,
            context=_above(context),
            kind=SpanKind.SERVER,
            start_time=self._ns(arrival),
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "milepost"},
        )
        span_context = self._span.get_span_context()
        self.context = TraceContext(
            trace_id=f"{span_context.trace_id:032x}",
            span_id=f"{span_context.span_id:016x}",
            flags=int(span_context.trace_flags),
        )
        """Context of the span, for logs and for other engines."""

    def link(self, params: Mapping[str, Any] | None) -> None:
        """Links the request on another engine that a prompt's `kv_transfer_params` name."""
        given = (params or {}).get("traceparent")
        context = parsed(given) if isinstance(given, str) else None
        if context is not None:
            self._span.add_link(_remote(context))

    def generated(self, params: SamplingParams, tally: RequestTally) -> None:
        """Records the outcome of the request's answers, and makes the spans of its phases."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(request_attributes(self._model, params, tally))
        self._add_phases(tally)

    def end(self, scope: Mapping[str, Any], status: int | None) -> None:
        """Ends the span with the response's status and the access log's record of the request."""
        if self._span.is_recording():
            self._span.set_attributes(_http_attributes(scope, status))
            error = scope["milepost.record"].get("error")
            if status is None or status >= 500 or (error is not None and status < 400):
                self._span.set_status(Status(StatusCode.ERROR, error and error[:MAX_VALUE_CHARS]))
        self._span.end()

    def _add_phases(self, tally: RequestTally) -> None:
        loads = [each for each in tally.reports if each.loading_since is not None]
        loading = [each.loading_since for each in loads if each.loading_since is not None]
        admitted, first = tally.admitted_at, tally.first_at
        over = time.monotonic()
        known = [each for each in (*loading, admitted) if each is not None]
        self._add("queue", tally.arrival, min(known, default=over))
        for report in loads:
            assert report.loading_since is not None
            self._add(
                "load", report.loading_since, report.admitted_at, cache_attributes([report.cache])
            )
        if admitted is not None:
            self._add("prefill", admitted, over if first is None else first)
        if first is not None:
            self._add("decode", first, tally.now)

    def _add(
        self, name: str, start: float, end: float, attributes: Mapping[str, Any] | None = None
    ) -> None:
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            start_time=self._ns(start),
            attributes=attributes,
        )
        span.end(self._ns(max(start, end)))

    def _ns(self, seconds: float) -> int:
        """Returns a time of the monotonic clock in nanoseconds of the system's."""
        return self._clock_ns + int(seconds * 1e9)


def _http_attributes(scope: Mapping[str, Any], status: int | None) -> dict[str, Any]:
    record = scope["milepost.record"]
    found = {
        "http.request.method": scope["method"],
        "http.route": getattr(scope.get("route"), "path", None),
        "http.response.status_code": status,
        "error.type": str(status) if status is not None and status >= 400 else None,
        "gen_ai.request.id": record.get("id"),
        "gen_ai.response.id": record.get("id"),
        "milepost.client_gone": record.get("client_gone"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _above(context: TraceContext | None) -> Any:
    """Returns the parent for a span; None for none."""
    return None if context is None else set_span_in_context(NonRecordingSpan(_remote(context)))


def _remote(context: TraceContext) -> SpanContext:
    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(context.flags),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


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
        "gen_ai.usage.cache_read.input_tokens": sum(one.cache.reused for one in tally.reports),
        "gen_ai.usage.num_sequences": len(tally.num_tokens),
        "gen_ai.response.finish_reasons": tuple(tally.ended.values()) or None,
        "milepost.drafts.verified": tally.num_draft_tokens or None,
        "milepost.drafts.accepted": tally.num_accepted_tokens if tally.num_draft_tokens else None,
        **_latencies(tally),
        **cache_attributes([one.cache for one in tally.reports]),
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


def cache_attributes(reports: Sequence[CacheReport]) -> dict[str, int]:
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


def _summed(prefix: str, counts: Sequence[Mapping[Any, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter[str]())
    return {f"{prefix}.{name}": number for name, number in total.items()}
