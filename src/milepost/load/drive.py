"""Runs sessions against an endpoint, in an open loop (at a rate) or a closed loop (at a
concurrency), and summarises the results. The flags of `milepost bench` are made from `DriveConfig`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import aiohttp

from milepost.errors import ConfigError
from milepost.load.client import Endpoint, RequestResult, find_model, reason_of
from milepost.load.workloads import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveConfig:
    """How the load is sent. Raises ConfigError."""

    base_url: str = "http://127.0.0.1:8000"
    """The server, with or without /v1."""
    api_key: str | None = None
    """Key that is sent as a bearer token."""
    served_model: str | None = None
    """Name of the model; by default the first that the server lists."""
    concurrency: int = 16
    """Number of sessions at once (closed loop), if there is no request rate."""
    request_rate: float | None = None
    """Sessions per second, with exponential gaps (open loop); inf sends all at once."""
    num_warmups: int = 4
    """Number of requests before the measurement, with texts of their own."""
    temperature: float = 0.0
    """Sampling temperature of every request."""
    ignore_eos: bool = False
    """Ask for answers of full length; servers without this field refuse it."""
    timeout_s: float = 600.0
    """Longest time for one request."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r}: begin it with http:// or https://")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency}: use 1 or more")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate}: use more than 0")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups}: use 0 or more")
        if not 0 <= self.temperature < inf:
            raise ConfigError(f"temperature={self.temperature}: use 0 for greedy, or more")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: use more than 0")
        if not (self.api_key or "").isprintable():
            raise ConfigError("api_key: use one line of text")


OnResult = Callable[[RequestResult], None]


async def drive(
    config: DriveConfig, load: Sequence[Session], *, seed: int, progress: OnResult
) -> tuple[list[RequestResult], float]:
    """Runs all sessions. Returns the results in order of completion, and the duration in seconds.

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
    """Runs one conversation; it ends at the first turn that fails."""
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
    play: Callable[[Session], Coroutine[Any, Any, None]],
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
    load: Sequence[Session], concurrency: int, play: Callable[[Session], Coroutine[Any, Any, None]]
) -> None:
    waiting = iter(load)

    async def worker() -> None:
        for session in waiting:
            await play(session)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())


PERCENTILES = (50, 90, 99)


def summarize(results: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Returns one JSON row: counts, rates, latencies in milliseconds, and the tokens that came from
    the cache.

    None stands for a number missing from the server's report.
    """
    good = [result for result in results if result.is_complete]
    prompt = _total(result.usage.get("prompt_tokens") for result in good)
    cached = _total(_cached(result) for result in good)
    completion = _total(result.usage.get("completion_tokens") for result in good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": sorted({result.error for result in results if result.error})[:5],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompt, 4) if prompt and cached is not None else None,
        "completion_tokens": completion,
        "output_tokens_per_s": None if completion is None else round(completion / seconds, 2),
        "ttft_ms": percentiles([r.first - r.start for r in good if r.first is not None]),
        "tpot_ms": percentiles([t for r in good if (t := _per_token(r)) is not None]),
        "itl_ms": percentiles([b - a for r in good for a, b in pairwise(r.arrivals)]),
        "e2e_ms": percentiles([r.end - r.start for r in good]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns p50, p90, p99 (nearest rank) and the mean in milliseconds; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    rounded = {f"p{p}": round(1000 * ordered[round(p / 100 * last)], 3) for p in PERCENTILES}
    return {**rounded, "mean": round(1000 * sum(ordered) / len(ordered), 3)}


def _total(counts: Iterable[Any]) -> int | None:
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _cached(result: RequestResult) -> int | None:
    details = result.usage.get("prompt_tokens_details")
    return details.get("cached_tokens") if isinstance(details, dict) else None


def _per_token(result: RequestResult) -> float | None:
    """Returns an answer's mean time per token, without the first token."""
    num_tokens = result.usage.get("completion_tokens")
    if not isinstance(num_tokens, int) or num_tokens < 2 or result.first is None:
        return None
    return (result.arrivals[-1] - result.first) / (num_tokens - 1)
