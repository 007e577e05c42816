"""Loads what requests need, and describes it for the log: one line per subject."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from milepost.config import EngineConfig
from milepost.engine.constraints import FormChecks, vocabulary_of
from milepost.engine.facts import Facts
from milepost.engine.processes import EngineClient, start_with_tokenizer
from milepost.errors import ConfigError
from milepost.server.callers import is_loopback
from milepost.server.config import ServerConfig, read_template
from milepost.server.service import Service
from milepost.server.tracing import require_tracing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


async def load(config: ServerConfig, engine_config: EngineConfig, client: EngineClient) -> Service:
    """Returns the service with engine, tokenizer and grammar process running. Raises what `run`
    raises, without waiting for the engine if the model's folder or tokenizer is missing."""
    require_tracing(config.otlp_traces_endpoint)
    tokenizer = await start_with_tokenizer(client)
    template = read_template(config.chat_template)
    if tokenizer is not None and template is not None:
        tokenizer.chat_template = template
    checks = await asyncio.to_thread(_form_checks, config, tokenizer, client.limits.vocab_size)
    await checks.start()
    service = Service(config, client, tokenizer, _names(config, engine_config), checks)
    service.encoder.start()
    return service


def _form_checks(
    config: ServerConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> FormChecks:
    vocabulary, problem = None, ""
    if tokenizer is not None:
        try:
            vocabulary = vocabulary_of(tokenizer, vocab_size, ())
        except ConfigError as error:
            problem = str(error)
    return FormChecks(vocabulary, timeout_s=config.grammar_timeout_s, problem=problem)


def _names(server: ServerConfig, engine: EngineConfig) -> Sequence[str]:
    """Returns the names that clients may call the model by."""
    return server.served_model_name or [engine.model or "milepost-tiny"]


def describe(service: Service) -> list[tuple[str, str]]:
    """Returns pairs of a subject and its description."""
    info = service.client.info
    facts = info.facts
    tokens = f"{info.num_pages * info.page_size:,} tokens"
    pages = f"{info.num_pages:,} of {info.page_size} tokens ({tokens})"
    slots = f"{info.num_slots:,}"
    if facts.is_shared:
        pages, slots = f"up to {pages}", f"up to {slots}, in the same memory as the pages"
    else:
        pages += f", {size(info.num_pages * facts.page_bytes)}"
        slots += f", {size(info.num_slots * facts.slot_bytes)}"
    names = ", ".join(service.names)
    memory = f"weights {size(facts.weights_bytes)}, cache {size(facts.cache_bytes)}"
    if service.client.config.tensor_parallel_size > 1:
        memory += " on each device"
    rows = [
        ("model", f"{names}, {_context(service)}"),
        ("device", f"{facts.device}, {facts.dtype}, {_kept(facts)}"),
        ("memory", memory),
        ("pages", pages),
        ("state slots", slots),
        ("parsers", f"tool calls {service.format.calls}, reasoning {service.format.reasoning}"),
    ]
    config = service.config
    if not (config.api_key or config.key_file or config.uds or is_loopback(config)):
        rows.append(
            ("keys", "none: whoever reaches the address may use it; set one with --api-key")
        )
    if facts.num_graphs:
        rows.insert(2, ("graphs", f"{facts.num_graphs} captured steps"))
    return rows


def _context(service: Service) -> str:
    """Returns the longest sequence, and what the device's memory leaves of the usual limits."""
    info, config = service.client.info, service.client.config
    longest = service.client.limits.max_model_len
    facts, words = info.facts, f"up to {longest:,} tokens"
    if config.max_model_len is None and longest < facts.num_positions:
        words += f" (of its {facts.num_positions:,}, as many as fit the memory)"
    if facts.step_tokens < config.step_tokens():
        words += f", {facts.step_tokens:,} a step"
    return words


def _kept(facts: Facts) -> str:
    kv = f"KV in {facts.kv_dtype}, " if facts.kv_dtype else ""
    return f"{kv}recurrent states in {facts.state_dtype}"


def size(num_bytes: float) -> str:
    """Returns bytes in the unit that leaves at most three digits."""
    power = 0
    while num_bytes >= 1000 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.{1 if power and num_bytes < 10 else 0}f} {_UNITS[power]}"
