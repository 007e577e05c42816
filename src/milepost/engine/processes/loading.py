"""Starts an engine while its tokenizer loads, and loads things once for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from milepost.engine.processes.client import EngineClient
from milepost.engine.text import tokenizer_for
from milepost.errors import EngineDeadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class LoadedOnce(Generic[T]):
    """Loads something when it is first asked for, and keeps it for later callers in the same event
    loop."""

    def __init__(self, load: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._load = load
        self._loading: asyncio.Task[T] | None = None
        self._is_over = False

    async def get(self) -> T:
        """Returns what was loaded. Others still get it if this call is cancelled. Raises what
        `load` raises, and EngineDeadError after `end` and in another event loop."""
        if self._is_over:
            raise EngineDeadError("the engine was closed: make a new one")
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        if self._loading.get_loop() is not asyncio.get_running_loop():
            raise EngineDeadError("the engine belongs to another event loop: make one for each")
        return await asyncio.shield(self._loading)

    async def end(self) -> T | None:
        """Stops loading. Returns what was loaded, or None if nothing was."""
        self._is_over = True
        loading = self._loading
        if loading is None:
            return None
        loading.cancel()
        await asyncio.wait([loading])
        is_there = not loading.cancelled() and loading.exception() is None
        return loading.result() if is_there else None


async def start_with_tokenizer(client: EngineClient) -> PreTrainedTokenizerBase | None:
    """Starts the engine, and returns its tokenizer; None with skip_tokenizer_init.

    Raises what either raises, without waiting for the engine if the model's folder or tokenizer is
    missing. The client is closed then.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(asyncio.to_thread(tokenizer_for, client.config))
            tasks.create_task(client.start())
    except ExceptionGroup as group:
        await client.close()
        raise group.exceptions[0] from None  # it cancelled the other
    return loading.result()
