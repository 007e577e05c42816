"""The trace that a request belongs to, and the switch of tracing, `--otlp-traces-endpoint`. Without
it no library of OpenTelemetry is imported.

The context is W3C's (https://www.w3.org/TR/trace-context). Both of its headers come from outside:
what is not exactly as specified is ignored, as the specification has it, and then the request
begins a trace of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from milepost.errors import ConfigError, needing

if TYPE_CHECKING:
    from milepost.server.spans import Tracing


_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
MAX_CHARS = 256
"""Longest traceparent: later versions may append to it."""
MAX_STATE_CHARS = 512
"""Longest tracestate: the length that every service must be able to pass on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A span of another service, with its ids in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the header, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parsed(traceparent: str, state: str = "") -> TraceContext | None:
    """Returns the context in a header's value; None for one that is not valid."""
    match = _PARENT.fullmatch(traceparent) if len(traceparent) <= MAX_CHARS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    is_known = version == "00" and rest is None
    is_later = version not in ("00", "ff")
    if not (is_known or is_later) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, flags=int(flags, 16) & 1, state=state)


def read(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """Returns the context of a request's headers; None without a valid one."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    states = b",".join(value for name, value in headers if name == b"tracestate")
    state = states.decode("latin-1") if len(states) <= MAX_STATE_CHARS else ""
    return parsed(parents[0].decode("latin-1"), state)


PATH = "/v1/traces"
GRPC_PORT = 4317
"""The port on which collectors listen for OTLP over gRPC."""


def read_endpoint(url: str) -> str:
    """Returns the URL that spans are sent to: a collector's address gets OTLP's path. Raises
    ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"otlp_traces_endpoint={url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={url!r}: use a URL such as http://localhost:4318{PATH}: spans "
            "are sent as OTLP over HTTP"
        )
    if port == GRPC_PORT and parts.path in ("", "/"):
        raise ConfigError(
            f"otlp_traces_endpoint={url!r}: at port {GRPC_PORT} collectors expect gRPC; spans are "
            "sent as OTLP over HTTP, for which they listen at 4318"
        )
    return parts._replace(path=PATH).geturl() if parts.path in ("", "/") else url


def open_tracing(endpoint: str | None, model: str) -> Tracing | None:
    """Returns the tracing that makes and sends spans; None without an endpoint. Raises ConfigError
    if its libraries are not installed."""
    if endpoint is None:
        return None
    require_tracing(endpoint)
    from milepost.server.spans import Tracing

    return Tracing(read_endpoint(endpoint), model)


def require_tracing(endpoint: str | None) -> None:
    """Raises ConfigError if spans are wanted and their libraries are not installed."""
    if endpoint is None:
        return
    with needing("otlp_traces_endpoint", "otel"):
        import milepost.server.spans  # noqa: F401
