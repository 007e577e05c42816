"""Switches tracing on: `--otlp-traces-endpoint`. Without it no library of OpenTelemetry is
imported."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from milepost.errors import ConfigError, missing

if TYPE_CHECKING:
    from milepost.server.spans import Tracing

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
    """Returns what makes spans and sends them; None without an endpoint. Raises ConfigError if its
    libraries are not installed."""
    if endpoint is None:
        return None
    require_tracing(endpoint)
    from milepost.server.spans import Tracing

    return Tracing(read_endpoint(endpoint), model)


def require_tracing(endpoint: str | None) -> None:
    """Raises ConfigError if spans are wanted and their libraries are not installed."""
    if endpoint is None:
        return
    try:
        import milepost.server.spans  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing("otlp_traces_endpoint", error.name, "otel") from error
