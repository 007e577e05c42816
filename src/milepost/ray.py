"""Replicas of an engine on Ray Serve: `serve run milepost.ray:app`.

A front takes HTTP and asks one replica for each request. Each replica is a whole server in a
process of its own, with its engine beside it. A request goes to the replica where it costs least
(`scheduler.routing`): once a second, replicas report the digests of the pages that a checkpoint
makes usable, and any replica can compute the digests of a request. Ray adds and removes replicas
depending on how many requests run and wait at each.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import zmq
import zmq.asyncio
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from milepost.cache.tree import Chain
from milepost.config import EngineConfig
from milepost.engine.processes import EngineClient
from milepost.errors import ConfigError, MilepostError
from milepost.scheduler.routing import cost
from milepost.server import app as http
from milepost.server.config import ServerConfig
from milepost.server.errors import HttpError
from milepost.server.loading import load
from milepost.server.rendering import prompt_of
from milepost.server.service import Service
from milepost.zeromq import bound

STATS_S = 1.0
"""How often replicas report their pages."""
EVENT_BYTES = 2**26
"""Most bytes of a message from the replica's own engine, which names at most about 2,048 pages with
their tokens.
"""
KEY_BYTES = 8
"""Bytes of a page's digest that the router compares."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as the router sees it; empty if the prompt is unknown."""

    number: str = ""
    keys: tuple[bytes, ...] = ()
    """Keys of the prompt's full pages."""
    num_tokens: int = 0
    page_size: int = 0

    def num_lacking(self, pages: Any) -> int:
        """Returns the number of tokens to compute where these pages are usable."""
        return max(self.num_tokens - depth(self.keys, pages) * self.page_size, 1)


@dataclass(frozen=True, slots=True)
class _SentTo:
    """Destination of a request, and the tokens it lacks there."""

    replica_id: ReplicaID
    number: str
    num_lacking: int
    future: asyncio.Future[Any]
    """Cancelled if the request is given up before it was sent."""


class CostRouter(RequestRouter):
    """Prefers the replica where a request costs least, then the least busy, then the one with the
    fewest cached pages.

    A prompt's tokens count as waiting from when it is sent until its replica reports that the
    answer has begun, or until the answer is over: an answer that is not streamed begins with its
    end.
    """

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ARG002
        self._choices: dict[str, _SentTo] = {}
        """Ray's request id -> the choice, until the request is over."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        asked, waiting = _asked(pending_request), self._waiting(candidate_replicas)
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))

        def rank(replica: RunningReplica) -> tuple[int, int, int]:
            pages = replica.routing_stats.get("pages", ())
            num_requests = self._replica_queue_len_cache.get(replica.replica_id) or 0
            num_waiting = waiting.get(replica.replica_id, 0)
            return cost(asked.num_lacking(pages), num_waiting), num_requests, len(pages)

        chosen = sorted(shuffled, key=rank)
        if pending_request is not None and chosen:
            self._note(pending_request, chosen[0])
        return [[replica] for replica in chosen]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002
    ) -> None:
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._note(pending_request, replica)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        choice = self._choices.get(internal_request_id)
        if choice is not None and choice.replica_id == replica_id:
            del self._choices[internal_request_id]

    def _note(self, request: PendingRequest, replica: RunningReplica) -> None:
        """Counts a request's tokens as waiting at a replica, since other requests are routed before
        it has been sent.
        """
        asked = _asked(request)
        if asked.number:
            lacking = asked.num_lacking(replica.routing_stats.get("pages", ()))
            choice = _SentTo(replica.replica_id, asked.number, lacking, request.future)
            self._choices[request.metadata.internal_request_id] = choice

    def _waiting(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Returns the number of prompt tokens that wait at each replica."""
        begun = {each.replica_id: each.routing_stats.get("begun", ()) for each in replicas}
        waiting = dict.fromkeys(begun, 0)
        for id_, choice in list(self._choices.items()):
            if choice.future.cancelled():
                del self._choices[id_]
            elif choice.number not in begun.get(choice.replica_id, (choice.number,)):
                waiting[choice.replica_id] += choice.num_lacking
        return waiting


def _asked(pending_request: PendingRequest | None) -> Wanted:
    if pending_request is None:
        return Wanted()
    return pending_request.kwargs.get("asked") or Wanted()


def depth(keys: Any, pages: Any) -> int:
    """Returns how many of a prompt's first pages are there."""
    for number, key in enumerate(keys):
        if key not in pages:
            return number
    return len(keys)


class Replica:
    """A server without a socket."""

    async def __init__(self, options: Mapping[str, Any]) -> None:
        self._open = contextlib.AsyncExitStack()
        """Resources opened so far. Ray may end a replica at any time, even while it loads."""
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="milepost-"))
        endpoint = f"ipc://{Path(folder) / 'events'}"
        events = {"enable_kv_cache_events": True, "endpoint": endpoint, "hashes": "bytes"}
        config = ServerConfig(access_log=False, ui=False)
        engine = EngineConfig(**options, kv_events_config=events)
        self._client = EngineClient(engine, max_waiting=config.max_waiting)
        self._open.push_async_callback(self._client.close)
        context = zmq.asyncio.Context()
        self._open.callback(context.term)
        self._socket = bound(context.socket(zmq.SUB), max_bytes=EVENT_BYTES, max_queued=1)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a missed event is missed for good
        self._open.callback(self._socket.close, linger=0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._service: Service = await load(config, engine, self._client)
        self._open.push_async_callback(self._service.close)
        self._app = http.build(self._service)
        self._pages: dict[str, set[bytes]] = {}
        self._begun: set[str] = set()
        """Requests whose answers have begun and are not over."""
        self._open.callback(asyncio.create_task(self._follow()).cancel)

    async def look(self, path: str, body: bytes) -> Wanted:
        """Returns a request as the router sees it, as far as it is known."""
        try:
            prompt = await prompt_of(self._service, path, body)
        except (ValueError, MilepostError, HttpError):
            return Wanted()  # the replica that serves it reports the error
        if prompt is None:
            return Wanted(uuid.uuid4().hex)
        info = self._client.info
        chain = Chain(prompt.token_ids, info.page_size, prompt.cache_salt, info.identity)
        keys = tuple(digest[:KEY_BYTES] for digest in chain.full_digests())
        return Wanted(uuid.uuid4().hex, keys, len(prompt.token_ids), info.page_size)

    async def ask(
        self, scope: dict[str, Any], body: bytes, asked: Wanted | None = None
    ) -> AsyncIterator[Any]:
        """Yields status and headers of the response, then its body piece by piece."""
        number = asked.number if asked is not None else ""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        received, gone = [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": None}, receive, sent.put)
            finally:
                await sent.put(None)

        serving = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    self._begun.add(number)
                    yield bytes(message["body"])
            await serving
        finally:
            self._begun.discard(number)
            gone.set()
            await asyncio.wait([serving])

    def record_routing_stats(self) -> dict[str, Any]:
        pages = frozenset().union(*self._pages.values())
        return {"pages": pages, "begun": frozenset(self._begun)}

    async def check_health(self) -> None:
        if self._client.death is not None:
            raise RuntimeError(self._client.death)

    async def __del__(self) -> None:
        await self._open.aclose()

    async def _follow(self) -> None:
        """Follows the events that say which pages a checkpoint makes usable."""
        while True:
            _, _, payload = await self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    self._pages.clear()
                    continue
                keys = {key[:KEY_BYTES] for key in event["block_hashes"]}
                there = self._pages.setdefault(event["medium"], set())
                if event["type"] == "BlockStored":
                    there |= keys
                else:
                    there -= keys


@serve.deployment(max_ongoing_requests=10_000)
class Front:
    """Takes HTTP and passes each request to a replica."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        body = await _body_of(request, ServerConfig().max_request_bytes)
        if body is None:
            return Response("the body is too long", status_code=413)
        path = request.scope["path"]
        asked = Wanted()
        if request.method == "POST" and path.endswith("/completions"):
            with contextlib.suppress(RayError):  # the replica that answers it reports the error
                asked = await self._replicas.look.remote(path, body)
        names = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in names if name in request.scope}
        scope |= {"scheme": "http", "client": None, "server": None, "root_path": ""}
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
    return Front.bind(replica.bind(options))


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
