"""The endpoints for routers, load balancers and operators."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import FastAPI
from starlette.responses import Response

import milepost
from milepost.errors import EngineAsleepError, EngineDeadError
from milepost.server.service import Service

DRAIN_POLL_S = 0.02


def add(app: FastAPI, service: Service) -> None:
    """/ping, /load, /server_info, /kv_event_sources; with `enable_sleep_mode` those of sleep."""

    @app.get("/ping", response_class=Response)
    @app.post("/ping", response_class=Response)
    async def ping() -> Response:
        """The same as /health, as SageMaker asks for it."""
        if service.client.death is not None or service.is_closing:
            raise EngineDeadError(service.client.death or "the server is shutting down")
        return Response()

    @app.get("/load")
    async def load() -> dict[str, int]:
        """How many answers are running or waiting."""
        return {"server_load": service.client.num_in_flight}

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return _info(service)

    @app.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, Any]:
        """Where the cache's events are published, by rank."""
        config = service.client.config.kv_events_config
        if config is None or not config.is_on:
            return {}
        source = {
            "endpoint": config.endpoint,
            "replay_endpoint": config.replay_endpoint,
            "topic": config.topic,
            "hwm": config.hwm,
            "buffer_steps": config.buffer_steps,
            "publisher": config.publisher,
            "encoding": "msgpack",
            "schema_version": 1,
            "enable_kv_cache_events": True,
        }
        return {"0": source}

    if service.config.enable_sleep_mode:
        _add_sleep(app, service)


def _info(service: Service) -> dict[str, Any]:
    """As vLLM tells it, and flat for those that look there."""
    info, config = service.client.info, service.client.config
    cache = {
        "block_size": info.page_size,
        "num_gpu_blocks": info.num_pages,
        "num_state_slots": info.num_slots,
        "enable_prefix_caching": config.enable_prefix_caching,
        "mamba_cache_mode": config.mamba_cache_mode,
    }
    model = {
        "model": info.model,
        "served_model_name": service.names,
        "max_model_len": info.max_model_len,
    }
    scheduler = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    return {
        "vllm_config": {
            "model_config": model,
            "cache_config": cache,
            "scheduler_config": scheduler,
        },
        "model_id": service.names[0],
        "block_size": info.page_size,
        "version": milepost.__version__,
    }


def _add_sleep(app: FastAPI, service: Service) -> None:
    @app.post("/sleep")
    async def sleep(
        level: Literal["0", "1"] = "1", mode: Literal["abort", "wait"] = "abort"
    ) -> dict[str, Any]:
        """Take no requests, and from level 1 on forget what is cached and return its memory.

        Those that run are failed, or with mode=wait finished first. Weights stay where they are.
        """
        service.is_asleep = True
        if mode == "abort":
            service.client.fail_all(EngineAsleepError("the engine was put to sleep"))
        while service.is_asleep and (
            service.client.num_in_flight
            or (level != "0" and not await service.client.release_cache())
        ):
            await asyncio.sleep(DRAIN_POLL_S)
        if not service.is_asleep:  # woken while it waited
            return {"status": "awake"}
        return {"status": "sleeping", "level": int(level)}

    @app.post("/wake_up")
    async def wake_up() -> dict[str, Any]:
        service.is_asleep = False
        return {"status": "awake"}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": service.is_asleep}
