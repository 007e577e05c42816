"""Connects the HTTP handlers to the tokenizer (`encoder`) and the engine, and refuses requests that
cannot be served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.engine.constraints import FormChecks, check_budget, check_combination, think_ids
from milepost.engine.processes import EngineClient, Stream, StreamBell
from milepost.engine.prompts import Prompt, check_prompt
from milepost.engine.text import chat, overridden, special_texts
from milepost.errors import (
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    RequestTimeoutError,
    ServerClosingError,
)
from milepost.sampling_params import SamplingParams
from milepost.server.config import ServerConfig, read_object
from milepost.server.encoder import TOO_LONG, Encoder
from milepost.server.errors import HttpError
from milepost.server.metrics import RequestMetrics
from milepost.server.parsing.answer import find_format, reasoning_tokens, special_tags
from milepost.server.submission import Submission
from milepost.server.templates import check_template_kwargs, variables_of
from milepost.server.unknown import UnknownFields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Service:
    """Everything that the handlers share."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase | None,
        names: Sequence[str],
        form_checks: FormChecks | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.form_checks = form_checks or FormChecks(None, timeout_s=config.grammar_timeout_s)
        self.names = list(names)
        self.started = int(time.time())
        self.metrics = RequestMetrics()
        self.metrics.add_vllm_names(self.names[0], self._cache_config, lambda: self.is_asleep)
        self.metrics.add_processes(lambda: client.pid)
        self.unknown = UnknownFields(strict=config.strict)
        template = getattr(tokenizer, "chat_template", None)
        self.template_variables = variables_of(template)
        self.sampling_defaults = overridden(
            client.info.sampling_defaults,
            read_object("override_generation_config", config.override_generation_config),
        )
        self._template_defaults = read_object(
            "default_chat_template_kwargs", config.default_chat_template_kwargs
        )
        self._check_template_defaults()
        self.format = find_format(
            template,
            calls=config.tool_call_parser,
            reasoning=config.reasoning_parser,
            model_type=client.info.facts.model_type,
        )
        self._special_tags = special_tags(self.format, tokenizer)
        self.reasoning_tokens = reasoning_tokens(self.format, tokenizer)
        self._think_ids = think_ids(tokenizer)
        self.counts_thinking = None not in self._think_ids
        """Whether the engine can count the tokens of this model's reasoning."""
        self.is_closing = False
        self.is_asleep = False
        special = None
        if tokenizer is not None and not config.special_tokens_in_content:
            special = special_texts(tokenizer)
        self.encoder = Encoder(
            tokenizer,
            client.info.max_model_len,
            special=special,
            template_timeout_s=min(config.template_timeout_s, config.request_timeout_s),
        )

    @property
    def end_of_reasoning(self) -> int | None:
        """The token that closes the reasoning, if a single token does."""
        return None if self.reasoning_tokens is None else self.reasoning_tokens.closes

    def _check_template_defaults(self) -> None:
        """Raises ConfigError for variables that the chat template does not read."""
        try:
            check_template_kwargs(self._template_defaults, self.template_variables)
        except HttpError as error:
            raise ConfigError(f"default_{error.detail}") from error

    def _cache_config(self) -> dict[str, object]:
        info, config = self.client.info, self.client.config
        return {
            "block_size": info.page_size,
            "num_gpu_blocks": info.num_pages,
            "num_state_slots": info.num_slots,
            "cache_dtype": "auto",
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "mamba_cache_mode": config.mamba_cache_mode,
        }

    def switched_on(self, variable: str) -> dict[str, bool] | None:
        """Returns template arguments with this variable, if the template reads it."""
        known = self.template_variables
        return {variable: True} if known is not None and variable in known else None

    def reads_special_tokens(self, *, has_tools: bool) -> bool:
        """Returns whether an answer's text must include special tokens to be parsed."""
        return "reasoning" in self._special_tags or (has_tools and "calls" in self._special_tags)

    def check_model(self, name: str | None) -> str:
        """Returns the model's name for the response. Raises HttpError 404 for a model that is not
        served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise HttpError(
                404,
                f"model {name!r} is not served here: use {' or '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        documents: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        is_cut: bool = False,
    ) -> chat.ChatPrompt:
        """Returns a conversation as token ids and marks."""
        variables = self.template_variables
        template_kwargs = {**self._template_defaults, **(template_kwargs or {})}
        check_template_kwargs(template_kwargs, variables)
        for name, given in (("tools", tools), ("documents", documents)):
            if given and variables is not None and name not in variables:
                raise HttpError(
                    400,
                    f"{name}: this model's chat template does not support them: leave them out, or "
                    "serve a model that was trained with them",
                    param=name,
                )
        if documents:
            template_kwargs["documents"] = documents

        options = {
            "tools": tools,
            "chat_template_kwargs": template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        size = _length(messages) + _length(tools) + _length(documents)
        return await self.encoder.encode_chat(messages, size, options, is_cut=is_cut)

    async def checked(self, params: SamplingParams, field: str) -> SamplingParams:
        """Returns the parameters with their form checked; `field` is named in errors about it.
        Raises InvalidRequestError."""
        if params.structured_outputs is None:
            return params
        wanted = replace(params.structured_outputs, field=field)
        if isinstance(wanted.json, Mapping):  # its numbers may be too large for a frame
            wanted = replace(wanted, json=json.dumps(wanted.json))
        params = replace(params, structured_outputs=wanted)
        check_combination(params)
        await self.form_checks.check(wanted)
        return params

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int,
        arrival: float,
        field: str,
        keeps_steps: bool = False,
    ) -> Submission:
        """Queues all prompts or none. `field` is named in errors about prompts; `keeps_steps` is
        passed to `Stream`."""
        if self.is_closing:
            raise ServerClosingError("the server is shutting down")
        if self.client.death is not None:
            raise EngineDeadError(self.client.death)
        if self.is_asleep:
            raise EngineAsleepError("the engine is asleep: POST /wake_up wakes it")
        if priority and self.config.scheduling_policy == "fcfs":
            raise InvalidRequestError(
                f"priority={priority}: this server answers in order of arrival; start it with "
                "--scheduling-policy priority"
            )
        self._check(prompts, params, field)
        bell = StreamBell()
        streams = [
            self.client.add(prompt, params, priority=priority, bell=bell, keeps_steps=keeps_steps)
            for prompt in prompts
        ]
        remaining = arrival + self.config.request_timeout_s - time.monotonic()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(remaining, 0.0), self._time_out, streams)
        return Submission(streams, bell, timer)

    def check_number(self, num_prompts: int, num_each: int) -> None:
        """Raises InvalidRequestError or QueueFullError if these are more answers than may run or
        wait."""
        num_answers = num_prompts * num_each
        if num_answers > self.client.max_in_flight:
            raise InvalidRequestError(
                f"n={num_each}: {num_prompts} prompts with {num_each} answers each are more than "
                f"the {self.client.max_in_flight} that this server accepts at once"
            )
        self.client.check_room(num_answers)

    def _check(self, prompts: Sequence[Prompt], params: SamplingParams, field: str) -> None:
        self.check_number(len(prompts), params.n)
        params.check_vocab(self.client.info.vocab_size)
        check_budget(params.thinking_token_budget, self._think_ids[1])
        for prompt in prompts:
            self.check_prompt(prompt, params, field)

    def check_prompt(self, prompt: Prompt, params: SamplingParams, field: str) -> None:
        """Raises HttpError 400 for a prompt that cannot be served with these parameters."""
        info = self.client.info
        try:
            check_prompt(
                prompt,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                max_cache_marks=self.client.config.max_cache_marks,
            )
        except InvalidRequestError as error:
            is_long = len(prompt.token_ids) >= info.max_model_len
            code = TOO_LONG if is_long else None
            raise HttpError(400, f"{field}: {error}", param=field, code=code) from error
        room = info.max_model_len - len(prompt.token_ids)
        if params.max_tokens is not None and params.max_tokens > room:
            raise HttpError(
                400,
                f"max_tokens={params.max_tokens}: the prompt has {len(prompt.token_ids)} tokens, "
                f"which leaves {room} of max_model_len={info.max_model_len}",
                param="max_tokens",
                code=TOO_LONG,
            )

    def _time_out(self, streams: Sequence[Stream]) -> None:
        limit = self.config.request_timeout_s
        for stream in streams:
            stream.fail(RequestTimeoutError(f"the request took longer than {limit:g} seconds"))

    async def close(self) -> None:
        await self.encoder.close()
        await self.form_checks.close()


def _length(value: Any) -> int:
    """Returns the length of all texts in a value."""
    length, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, Mapping):
            todo += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            todo += item
    return length
