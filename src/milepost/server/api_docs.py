"""The description of the API, and the page that shows it.

The page's script and style come from this server (the package fastapi-offline has Swagger UI), so
the page works without internet access. They reveal nothing and need no key.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

from milepost.server.callers import for_anyone, for_clients

_TYPES: Final = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon.png": "image/png",
}
"""Swagger UI's files, and their media types."""
_HEADERS: Final = {"x-content-type-options": "nosniff", "cache-control": "max-age=3600"}


def add(app: FastAPI) -> None:
    """Adds the description, its page and the page's files."""
    script, style, icon = (f"/docs/{name}" for name in _TYPES)

    @app.get("/openapi.json", include_in_schema=False)
    @for_clients
    async def description(request: Request) -> dict[str, Any]:
        root = request.scope["root_path"]
        return {**app.openapi(), **({"servers": [{"url": root}]} if root else {})}

    @app.get("/docs", include_in_schema=False)
    @for_clients
    async def page(request: Request) -> Response:
        root = request.scope["root_path"]
        return get_swagger_ui_html(
            openapi_url=f"{root}/openapi.json",
            title=f"{app.title} - Swagger UI",
            swagger_js_url=root + script,
            swagger_css_url=root + style,
            swagger_favicon_url=root + icon,
        )

    for name, media_type in _TYPES.items():
        _add_file(app, name, media_type)


def _add_file(app: FastAPI, name: str, media_type: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False)
    @for_anyone
    async def file() -> Response:
        return Response(_content(name), media_type=media_type, headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return (files("fastapi_offline") / "static" / name).read_bytes()
