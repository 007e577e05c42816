"""Starts an engine beside its tokenizer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from milepost.engine.processes.client import EngineClient
from milepost.engine.text import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
