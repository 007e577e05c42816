"""Serves the page's files, which stand next to this one, and the state that it draws.

Everything comes from this server: the policy lets a browser load nothing from elsewhere, and run no
other script. Pictures may also be data: URLs, which load nothing: the page shows those that a
person sends. The files reveal nothing, so they need no key; the state needs an operator's.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.responses import Response

from milepost.engine.processes import EngineClient
from milepost.errors import RequestTimeoutError
from milepost.server.callers import for_anyone, for_operators

STATE_PATH: Final = "/ui/state"
FRESH_S = 0.5
"""Shortest time between two readings of the state; pages that are open together share one."""
TIMEOUT_S = 30.0
"""Seconds to wait for the state: it is read between steps, and a step may take long."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).parent / "static"

FILES: Final = {
    "/" if path.name == "page.html" else f"/ui/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
"""Files by path. Those in `vendor/` are libraries of others; their names hold their versions."""

PATHS: Final = frozenset((*FILES, STATE_PATH))
"""All of the page's paths. An open page asks for one each second."""

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class States:
    """Reads the engine's state for all open pages."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._state = b""
        self._at = float("-inf")
        self._asking: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """Returns the state as JSON. Raises TimeoutError and EngineDeadError."""
        if time.monotonic() - self._at < FRESH_S:
            return self._state
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._client.state())
        async with asyncio.timeout(TIMEOUT_S):
            state = await asyncio.shield(self._asking)
        if state is not self._state:
            self._state, self._at = state, time.monotonic()
        return state


def add(app: FastAPI, client: EngineClient) -> None:
    """Adds the page, its files, and its state."""
    states = States(client)
    for path, file in FILES.items():
        _add_file(app, path, file)

    @app.get(STATE_PATH, include_in_schema=False)
    @for_operators
    async def state() -> Response:
        try:
            content = await states.get()
        except TimeoutError as error:
            raise RequestTimeoutError("the engine is in a long step: ask again") from error
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(content, media_type="application/json", headers=headers)


def headers_of(file: Path) -> dict[str, str]:
    """Returns the headers of a file: browsers keep libraries, and ask for our own files again."""
    is_library = file.parent.name == "vendor"
    kept = {"cache-control": "max-age=31536000, immutable"} if is_library else {}
    return {**HEADERS, **kept, "content-type": _TYPES[file.suffix]}


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content, headers = file.read_bytes(), headers_of(file)

    @app.get(path, include_in_schema=False)
    @for_anyone
    async def read() -> Response:
        return Response(content, headers=headers)
