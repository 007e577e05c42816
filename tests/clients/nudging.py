"""A proxy between an agent and a server whose model is random: it has the model call a harmless
tool first and then say that it is done, so that a session takes two turns and ends.

All else of a body is passed on as the agent wrote it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

DONE = {"enum": ["done"]}
_HOP_BY_HOP = {"connection", "host", "transfer-encoding", "content-length", "accept-encoding"}


@dataclass(slots=True)
class Nudging:
    """A running proxy, and what passed through it."""

    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)


@contextlib.contextmanager
def nudging(target: str, tool: str) -> Iterator[Nudging]:
    """In front of `target`; `tool` is what the model calls first."""
    proxy = Nudging()
    client = httpx.Client(timeout=300)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._pass_on(None)

        do_HEAD = do_GET  # noqa: N815 - http.server's names

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            proxy.asked.append((self.path, body))
            self._pass_on(nudged(self.path, body, tool))

        def _pass_on(self, body: dict[str, Any] | None) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            method = "GET" if body is None else "POST"
            found = client.request(method, target + self.path, json=body, headers=headers)
            if body is not None:
                proxy.statuses.append(found.status_code)
                proxy.ignored |= set(found.headers.get("x-milepost-ignored", "").split(", "))
                if found.status_code != 200:
                    proxy.refusals.append(found.text)
            self.send_response(found.status_code)
            for name in ("content-type", "x-request-id"):
                if name in found.headers:
                    self.send_header(name, found.headers[name])
            self.send_header("content-length", str(len(found.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()


def nudged(path: str, body: dict[str, Any], tool: str) -> dict[str, Any]:
    """A body with a tool choice before the first result, and a form after it."""
    if "count_tokens" in path or not body.get("tools"):
        return body
    said = body.get("input") or [m for m in body["messages"] if m["role"] != "system"]
    has_result = f'"{tool}"' in json.dumps(said)
    if "/messages" in path:
        if not has_result:
            return {**body, "tool_choice": {"type": "tool", "name": tool}}
        form = {"format": {"type": "json_schema", "schema": DONE}}
        config = {**body.get("output_config", {}), **form, "effort": "low"}
        return {**body, "tool_choice": {"type": "none"}, "output_config": config}
    if "/chat/" in path:
        if not has_result:
            choice = {"type": "function", "function": {"name": tool}}
            return {**body, "tool_choice": choice}
        form = {"type": "json_schema", "json_schema": {"name": "end", "schema": DONE}}
        return {**body, "tool_choice": "none", "response_format": form}
    if not has_result:
        return {**body, "tool_choice": {"type": "function", "name": tool}}
    form = {"type": "json_schema", "name": "end", "schema": DONE}
    text = {**body.get("text", {}), "format": form}
    return {**body, "tool_choice": "none", "text": text}
