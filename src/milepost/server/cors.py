"""Cross-origin requests: which pages of other origins a browser lets read answers."""

from __future__ import annotations

from typing import Any

from starlette.middleware.cors import CORSMiddleware

from milepost.server.config import ServerConfig

EXPOSED = ("x-milepost-ignored", "x-request-id", "retry-after")


def wrap(app: Any, config: ServerConfig) -> Any:
    """Around everything else: a browser asks for leave without a key, and reads errors too."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )
