"""The front and its replicas as one application."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.ray.replica import Replica
from milepost.ray.router import CostRouter, Wanted
from milepost.server.config import ServerConfig

STATS_S = 1.0
"""Seconds between two reports of a replica's pages."""


class Front:
    """Takes HTTP and passes each request to a replica."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        body = await _body_of(request, ServerConfig().max_request_bytes)
        if body is None:
            return Response("the body is too long", status_code=413)
        root = request.scope.get("root_path", "").rstrip("/")  # `serve run --route-prefix`
        path = request.scope["path"].removeprefix(root)
        asked = Wanted()
        if request.method == "POST" and path.endswith("/completions"):
            with contextlib.suppress(RayError):  # the replica that answers it reports the error
                asked = await self._replicas.look.remote(path, body)
        names = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in names if name in request.scope}
        server = request.scope.get("server")  # its address decides which names are checked
        scope |= {"scheme": "http", "client": None, "server": server, "root_path": "", "path": path}
        answered = self._replicas.options(stream=True).ask.remote(scope, body, asked=asked)
        status, headers = await anext(answered)
        response = StreamingResponse(answered, status_code=status)
        response.raw_headers = [tuple(header) for header in headers]
        return response


async def _body_of(request: Request, most: int) -> bytes | None:
    """Returns the body, or None if it is longer than `most` bytes; holds no more than that."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            return None
    return bytes(body)


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application for `serve run milepost.ray:app`. Its arguments are the fields of
    `EngineConfig`, such as model=...; `replicas`, or `min_replicas` and `max_replicas`; and
    `num_gpus` for each replica. Without arguments, it is one replica of the embedded model. Raises
    ConfigError.
    """
    return routed(args, CostRouter)


def routed(args: Mapping[str, Any], router: type[RequestRouter]) -> serve.Application:
    """Returns the application of `app` with another router."""
    given = dict(args)
    num_gpus = float(given.pop("num_gpus", 0))
    lowest = int(given.pop("min_replicas", given.get("replicas", 1)))
    highest = int(given.pop("max_replicas", given.pop("replicas", lowest)))
    given.pop("replicas", None)
    options = _options(given)
    most = EngineConfig(**options).max_num_seqs
    replica = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=most + ServerConfig().max_waiting,
        ray_actor_options={"num_cpus": 0 if num_gpus else 0.5, "num_gpus": num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=lowest,
            initial_replicas=lowest,
            max_replicas=highest,
            target_ongoing_requests=most,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=router, request_routing_stats_period_s=STATS_S
        ),
    )
    front = serve.deployment(Front, max_ongoing_requests=10_000)
    return front.bind(replica.bind(options))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of the configuration; those given as text, as on a command line, are
    converted.
    """
    hints = get_type_hints(EngineConfig)
    known = {field.name for field in fields(EngineConfig)} - {"kv_events_config"}
    for name in given:
        if name not in known:
            raise ConfigError(f"argument {name!r} is unknown: use the fields of EngineConfig")
    return {
        name: msgspec.convert(value, hints[name], strict=False)
        if isinstance(value, str) and not name.endswith("_config")
        else value
        for name, value in given.items()
    }
