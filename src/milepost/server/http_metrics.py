"""Metrics of HTTP requests, named as by prometheus-fastapi-instrumentator, which vLLM uses.

The gate sees every request with its size, status and time, so these lines do the same without that
library's middleware. Paths are routes, never what a client wrote; methods are those that exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

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
    """Counts finished requests in a registry."""

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
