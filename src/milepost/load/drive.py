"""Runs sessions against an endpoint: open loop (at a rate) or closed loop (at a concurrency)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from milepost.errors import ConfigError
from milepost.load.client import Endpoint, RequestResult, find_model, reason_of
from milepost.load.config import DriveConfig
from milepost.load.workloads import Session

OnResult = Callable[[RequestResult], None]


async def drive(
    config: DriveConfig, load: Sequence[Session], *, seed: int, progress: OnResult
) -> tuple[list[RequestResult], float]:
    """Run all sessions. Returns the results in order of completion, and the duration in seconds.

    Raises ConfigError if the server does not answer.
    """
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=config.timeout_s)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as http:
        endpoint = await _endpoint(config, http)
        await _warm_up(endpoint, config)
        results: list[RequestResult] = []

        def note(result: RequestResult) -> None:
            results.append(result)
            progress(result)

        start = time.perf_counter()
        await _play_all(config, load, seed, lambda session: _play(endpoint, session, note))
        return results, time.perf_counter() - start


async def _endpoint(config: DriveConfig, http: aiohttp.ClientSession) -> Endpoint:
    model = config.served_model
    try:
        model = model or await find_model(http, config.base_url, config.api_key)
    except aiohttp.ClientResponseError as error:
        raise ConfigError(
            f"base_url={config.base_url!r} lists no models ({error.status} {error.message}): check "
            "the address and --api-key, or name the model with --served-model"
        ) from error
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"base_url={config.base_url!r}: this is no server's address") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(
            f"base_url={config.base_url!r} does not answer: {reason_of(error)}"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"base_url={config.base_url!r} lists no models: name yours with --served-model"
        ) from error
    options: dict[str, Any] = {"temperature": config.temperature}
    if config.ignore_eos:
        options["ignore_eos"] = True
    return Endpoint(
        http,
        config.base_url,
        model=model,
        api_key=config.api_key,
        options=options,
        clock=time.perf_counter,
    )


async def _warm_up(endpoint: Endpoint, config: DriveConfig) -> None:
    for number in range(config.num_warmups):
        result = await endpoint.ask([{"role": "user", "content": f"warm-up number {number}"}], 8)
        if result.error is not None:
            raise ConfigError(f"base_url={config.base_url!r} refuses a request: {result.error}")


async def _play(endpoint: Endpoint, session: Session, note: OnResult) -> None:
    """Run one conversation; it ends at the first turn that fails."""
    messages: list[Mapping[str, Any]] = []
    for turn in session.turns:
        messages += turn.messages
        result = await endpoint.ask(messages, turn.max_tokens)
        note(result)
        if result.error is not None:
            return
        messages.append({"role": "assistant", "content": result.text})


async def _play_all(
    config: DriveConfig,
    load: Sequence[Session],
    seed: int,
    play: Callable[[Session], Awaitable[None]],
) -> None:
    is_timed = any(session.arrival_s is not None for session in load)
    if config.request_rate is None and not is_timed:
        await _closed_loop(load, config.concurrency, play)
        return
    rng, at, start = random.Random(seed), 0.0, time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for session in load:
            if config.request_rate is not None:
                at += rng.expovariate(config.request_rate)
            else:
                at = session.arrival_s or 0.0
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.create_task(play(session))


async def _closed_loop(
    load: Sequence[Session], concurrency: int, play: Callable[[Session], Awaitable[None]]
) -> None:
    waiting = iter(load)

    async def worker() -> None:
        for session in waiting:
            await play(session)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())
