"""Cross-origin requests: which pages of other origins a browser lets read answers."""

from __future__ import annotations

from typing import Any

from starlette.middleware.cors import CORSMiddleware

from milepost.server.config import ServerConfig
from milepost.server.gate import aborter

EXPOSED = ("x-milepost-ignored", "x-request-id", "retry-after")


def wrap(app: Any, config: ServerConfig) -> Any:
    """Around everything else: a browser asks for leave without a key, and reads errors too."""
    if not config.allowed_origins:
        return app
    cors = CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )

    async def outermost(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["milepost.abort"] = aborter(send)
        await cors(scope, receive, send)

    return outermost
