"""The OpenAI-compatible HTTP server in front of an engine process. Besides the folders `anthropic`,
`responses` and `parsing` (formats of tool calls and reasoning), its modules are:

    begin and end            run, config, loading, stats
    paths                    app, api_docs, operation, rendering
    OpenAI endpoints         completions, chat, conversation
    before the application   connections, http1, gate, callers
    a request's body         bodies, fields, protocol, parts, tools, unknown
    its interpretation       messages, forms, parameters
    towards the engine       service, generation, observers
    the response             answers, stream, logprobs, errors, transfer
    metrics                  metrics, vllm_metrics
    traces                   tracing, spans
    files of requests        batch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.server.app import create_app
    from milepost.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, since the command line only needs the configuration."""
    if name == "create_app":
        from milepost.server.app import create_app

        return create_app
    if name == "ServerConfig":
        from milepost.server.config import ServerConfig

        return ServerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
