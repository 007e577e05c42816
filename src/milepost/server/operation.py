"""The endpoints for routers, load balancers and operators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from starlette.responses import Response

import milepost
from milepost.engine.metrics import Metric
from milepost.errors import EngineAsleepError, EngineDeadError
from milepost.server.callers import for_anyone, for_clients, for_operators
from milepost.server.errors import MEANINGS, HttpError
from milepost.server.metrics import CONTENT_TYPE
from milepost.server.service import Service

DRAIN_POLL_S = 0.02
METRICS_TIMEOUT_S = 5.0


def add(app: FastAPI, service: Service) -> None:
    """Adds health, metrics and information, and with `enable_sleep_mode` the sleep endpoints."""
    _add_health(app, service)
    _add_metrics(app, service)
    _add_info(app, service)
    if service.config.enable_sleep_mode:
        _add_sleep(app, service)

    @app.post("/reset_prefix_cache", responses={409: {"description": "Requests are running."}})
    @for_operators
    async def reset_prefix_cache(reset_external: bool = False) -> dict[str, Any]:
        """Empties the cache in GPU and host memory; with reset_external=true the files in
        --cache-dir are deleted too.
        """
        if not await service.client.reset_prefix_cache(
            with_files=reset_external, timeout_s=service.config.request_timeout_s
        ):
            raise HttpError(409, "requests are running: try again when none are")
        return {"reset": True}


def _add_health(app: FastAPI, service: Service) -> None:
    def check() -> None:
        if service.client.death is not None or service.is_closing:
            raise EngineDeadError(service.client.death or "the server is shutting down")

    @app.get("/health", responses={503: MEANINGS[503]})
    @for_anyone
    async def health() -> dict[str, Any]:
        check()
        return {"status": "ok"}

    @app.get("/ping", response_class=Response)
    @app.post("/ping", response_class=Response)
    @for_clients
    async def ping() -> Response:
        """Does the same as /health, for SageMaker."""
        check()
        return Response()


def _add_metrics(app: FastAPI, service: Service) -> None:
    engine: Sequence[Metric] = ()

    @app.get("/metrics", response_class=Response)
    @for_operators
    async def metrics() -> Response:
        nonlocal engine
        with contextlib.suppress(TimeoutError):  # during a long step the last figures are sent
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                engine = await service.client.metrics()
        return Response(service.metrics.expose(engine), media_type=CONTENT_TYPE)

    @app.get("/load")
    @for_clients
    async def load() -> dict[str, int]:
        """Returns the number of answers that are running or waiting."""
        return {"server_load": service.client.num_in_flight}


def _add_info(app: FastAPI, service: Service) -> None:
    @app.get("/version")
    @for_clients
    async def version() -> dict[str, Any]:
        return {"version": milepost.__version__}

    @app.get("/server_info")
    @app.get("/get_server_info")
    @for_clients
    async def server_info() -> dict[str, Any]:
        return _info(service)

    @app.get("/kv_event_sources")
    @for_clients
    async def kv_event_sources() -> dict[str, Any]:
        """Returns where the cache's events are published, by rank."""
        config = service.client.config.kv_events_config
        if config is None or not config.is_on:
            return {}
        names = ("endpoint", "replay_endpoint", "topic", "hwm", "buffer_steps", "publisher")
        source = {name: getattr(config, name) for name in names}
        encoding = {"encoding": "msgpack", "schema_version": 1, "enable_kv_cache_events": True}
        return {"0": {**source, **encoding}}


def _info(service: Service) -> dict[str, Any]:
    """Returns the description as vLLM has it, and flat for clients that look there."""
    info, config = service.client.info, service.client.config
    cache = {
        "block_size": info.page_size,
        "num_gpu_blocks": info.num_pages,
        "num_state_slots": info.num_slots,
        "enable_prefix_caching": config.enable_prefix_caching,
        "mamba_cache_mode": config.mamba_cache_mode,
    }
    length = service.client.limits.max_model_len
    model = {"model": info.model, "served_model_name": service.names, "max_model_len": length}
    scheduler = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": info.facts.step_tokens,
    }
    configs = {"model_config": model, "cache_config": cache, "scheduler_config": scheduler}
    return {
        "vllm_config": configs,
        "model_id": service.names[0],
        "block_size": info.page_size,
        "version": milepost.__version__,
    }


def _add_sleep(app: FastAPI, service: Service) -> None:
    @app.post("/sleep")
    @for_operators
    async def sleep(
        level: Literal["0", "1"] = "1", mode: Literal["abort", "wait"] = "abort"
    ) -> dict[str, Any]:
        """Stops taking requests; from level 1 on, drops the cache and returns its memory.

        Running requests fail, or with mode=wait finish first. Weights stay where they are.
        """
        service.is_asleep = True
        if mode == "abort":
            service.client.fail_all(EngineAsleepError("the engine was put to sleep"))
        while service.is_asleep and (
            service.client.num_in_flight
            or (level != "0" and not await service.client.release_cache())
        ):
            await asyncio.sleep(DRAIN_POLL_S)
        if not service.is_asleep:  # woken meanwhile
            return {"status": "awake"}
        return {"status": "sleeping", "level": int(level)}

    @app.post("/wake_up")
    @for_operators
    async def wake_up() -> dict[str, Any]:
        service.is_asleep = False
        return {"status": "awake"}

    @app.get("/is_sleeping")
    @for_clients
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": service.is_asleep}
