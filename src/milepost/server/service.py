"""Connects the HTTP handlers to the tokenizer (`encoder`) and the engine, and refuses requests that
cannot be served."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import milepost
from milepost.engine.constraints import FormChecks, think_ids
from milepost.engine.media import Preparer, images_of
from milepost.engine.processes import EngineClient, Stream
from milepost.engine.prompts import Prompt
from milepost.engine.text import Encoder, special_texts, text_length, with_overrides
from milepost.engine.validation import validate
from milepost.errors import (
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    InvalidPromptError,
    InvalidRequestError,
    RequestTimeoutError,
    ServerClosingError,
)
from milepost.sampling_params import SamplingParams
from milepost.server.bodies import LargeWork, size_of
from milepost.server.config import ServerConfig, read_object
from milepost.server.errors import TOO_LONG, HttpError
from milepost.server.logprobs import TokenBytes
from milepost.server.messages import check_template_kwargs, for_template, variables_of
from milepost.server.metrics import RequestMetrics
from milepost.server.parsing.answer import find_format, reasoning_tokens, special_tags
from milepost.server.protocol import ChatRequest, TokenizeRequest
from milepost.server.responses.store import ResponseStore
from milepost.server.stats import ShortPrompts
from milepost.server.tracing import open_tracing
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
        self.metrics = RequestMetrics(
            self.names[0],
            cache_config=self._cache_config,
            is_asleep=lambda: self.is_asleep,
            engine_pid=lambda: client.pid,
            build=_build(client),
        )
        self.short_prompts = ShortPrompts(client)
        self.tracing = open_tracing(config.otlp_traces_endpoint, self.names[0])
        self.unknown = UnknownFields(strict=config.strict)
        template = getattr(tokenizer, "chat_template", None)
        self.template_variables = variables_of(template)
        self.sampling_defaults = with_overrides(
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
        self.counts_thinking = None not in think_ids(tokenizer)
        """Whether the engine can count the tokens of this model's reasoning."""
        self._token_bytes: TokenBytes | None = None
        self._images = Preparer.of(client.config, client.info.images, client.limits)
        self.large = LargeWork()
        self.responses = ResponseStore()
        self.is_closing = False
        self.is_asleep = False
        special = None
        if tokenizer is not None and not config.special_tokens_in_content:
            special = special_texts(tokenizer)
        self.encoder = Encoder(
            tokenizer,
            client.limits.max_model_len,
            special=special,
            template_timeout_s=min(config.template_timeout_s, config.request_timeout_s),
        )

    @property
    def end_of_reasoning(self) -> int | None:
        """The token that closes the reasoning, if a single token does."""
        return None if self.reasoning_tokens is None else self.reasoning_tokens.closes

    @property
    def fingerprint(self) -> dict[str, str]:
        """The field of responses that names the bitwise mode, if it is on."""
        found = self.client.info.facts.fingerprint
        return {"system_fingerprint": found} if found else {}

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
        body: ChatRequest | TokenizeRequest,
        *,
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any] | None,
        documents: Sequence[Any] | None = None,
        is_cut: bool,
    ) -> Prompt:
        """Returns a conversation as token ids and marks."""
        variables, size = self.template_variables, size_of(body.messages)
        messages = await self.large.run(lambda: for_template(body.messages or ()), size)
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
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
        }
        with naming("messages"):
            plain, images = await self.large.run(lambda: images_of(messages), size)
            media = await self._images.prepare(images, body.mm_processor_kwargs)
            options["image_texts"] = [] if media is None else media.texts
            size = await self.large.run(lambda: text_length([plain, options]), size)
            rendered = await self.encoder.encode_chat(plain, size, options, is_cut=is_cut)
            return rendered if media is None else media.put_in(rendered)

    async def token_bytes(self) -> TokenBytes:
        """Returns the bytes of the vocabulary, read at the first call. Raises as
        `Encoder.with_tokenizer`."""
        if self._token_bytes is None:
            self._token_bytes = await self.encoder.with_tokenizer(TokenBytes)
        return self._token_bytes

    async def checked(self, params: SamplingParams, field: str) -> SamplingParams:
        """Returns the parameters with their form checked; `field` is named in errors about it.
        Raises InvalidRequestError."""
        if params.structured_outputs is None:
            return params
        wanted = replace(params.structured_outputs, field=field).as_text
        params = replace(params, structured_outputs=wanted)
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
    ) -> Stream:
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
        for prompt in prompts:
            self._check_room(prompt, params)
        with naming(field):
            stream = self.client.add(prompts, params, priority=priority, keeps_steps=keeps_steps)
        limit, spent = self.config.request_timeout_s, time.monotonic() - arrival
        late = RequestTimeoutError(f"the request took longer than {limit:g} seconds")
        stream.fail_after(max(limit - spent, 0.0), late)
        return stream

    def check(self, prompt: Prompt, params: SamplingParams, field: str) -> None:
        """Raises the errors of `submit` for a request that can never be served, without queueing
        it."""
        with naming(field):
            validate(prompt, params, self.client.limits)
        self._check_room(prompt, params)

    def _check_room(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises HttpError 400 if max_tokens is more than the prompt leaves room for."""
        longest = self.client.limits.max_model_len
        room = longest - len(prompt.token_ids)
        if params.max_tokens is not None and 0 < room < params.max_tokens:
            raise HttpError(
                400,
                f"max_tokens={params.max_tokens}: the prompt has {len(prompt.token_ids)} tokens, "
                f"which leaves {room} of max_model_len={longest}",
                param="max_tokens",
                code=TOO_LONG,
            )

    async def close(self) -> None:
        self.large.close()
        await self.encoder.close()
        await self._images.close()
        await self.form_checks.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _build(client: EngineClient) -> dict[str, str]:
    """Returns the running versions and the device."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {
        "version": milepost.__version__,
        "python": platform.python_version(),
        **versions,
        "device": client.info.facts.device,
    }


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Inside, errors about a prompt name the field that contains it."""
    try:
        yield
    except InvalidPromptError as error:
        code = TOO_LONG if error.is_too_long else None
        raise HttpError(400, f"{field}: {error}", param=field, code=code) from error
