"""The Python API for programs with an event loop. The engine has a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack

from milepost.config import EngineConfig
from milepost.engine.media import Given, Media, Preparer, images_in, images_of
from milepost.engine.metrics import Metric
from milepost.engine.options import (
    CHAT_OPTIONS,
    ChatOptions,
    EngineOptions,
    compose_options,
    read_options,
)
from milepost.engine.outputs import GrowingOutput, RequestOutput
from milepost.engine.processes import (
    EngineClient,
    LoadedOnce,
    Stream,
    start_with_tokenizer,
)
from milepost.engine.prompts import (
    ChatMessages,
    Prompt,
    PromptLike,
    encoding,
    read_prompt,
    rendered_prompt,
)
from milepost.engine.text import Encoder, text_length, with_defaults
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.vllm_keywords import GENERATE, with_vllm_keywords

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_BOUND = 2**31
"""Stands for no limit on waiting requests: the program itself limits how many it sends."""


class AsyncLLM:
    """Loads a model and generates, in an event loop. Takes the options of `LLM`.

    The model is loaded by `start`, or by the first call that needs it. What has been asked for is
    served together. `async with` closes the engine at the end of the block.

    Raises ConfigError; `start` raises UnsupportedModelError and WeightsError as well, and
    EngineDeadError.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        self.config = read_options(model, options)
        self._client = EngineClient(self.config, max_waiting=_NO_BOUND)
        self._encoder = LoadedOnce(partial(_load, self._client))
        self._running: dict[str, _Running] = {}
        self._num_requests = 0
        self._preparer: Preparer | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Makes one from a configuration."""
        return cls(**asdict(engine_args))

    async def start(self) -> None:
        """Loads the model, if it is not loaded yet."""
        await self._encoder.get()

    async def close(self) -> None:
        """Ends the engine, after writing pending items to `cache_dir` for at most
        `cache_flush_timeout_s`. Running requests raise EngineDeadError, and so do later calls. The
        end of the program does the same."""
        encoder = await self._encoder.end()
        await self._client.close()
        if encoder is not None:
            await encoder.close()
        if self._preparer is not None:
            await self._preparer.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @with_vllm_keywords(GENERATE)
    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the growing answer to one prompt; each output holds the whole answer so far.
        Requests with lower `priority` numbers go first. Closing the generator, cancelling its task,
        or `abort` ends the request. Prompts and parameters are those of `LLM.generate`. Raises
        InvalidRequestError once it is iterated."""
        return self._answers(partial(self._read, prompt), sampling_params, request_id, priority)

    @with_vllm_keywords(GENERATE, CHAT_OPTIONS)
    def chat(
        self,
        messages: ChatMessages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for one conversation; options are those of `LLM.chat`. A chat template
        that takes too long is refused."""
        read = partial(self._render, messages, options)
        return self._answers(read, sampling_params, request_id, priority)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests that are running; unknown ids are ignored. Their last output has the
        `finish_reason` "abort"."""
        for id_ in [request_id] if isinstance(request_id, str) else request_id:
            running = self._running.get(id_)
            if running is not None:
                running.abort()

    async def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Returns the tokenizer, or None with skip_tokenizer_init."""
        return (await self._encoder.get()).tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters used for prompts without any, as `LLM` does."""
        await self.start()
        return with_defaults({}, self._client.info.sampling_defaults)

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Drops everything cached in memory, and with `reset_connector` also the contents of
        `cache_dir`. Returns False while requests are running."""
        await self.start()
        return await self._client.reset_prefix_cache(with_files=reset_connector)

    async def get_metrics(self) -> list[Metric]:
        """Returns the current values of all counters and gauges."""
        await self.start()
        return await self._client.metrics()

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine cannot answer."""
        await self.start()
        self._client.check_alive()

    # --- inside -----------------------------------------------------------------------------------

    async def _read(self, prompt: PromptLike) -> Prompt:
        encoder = await self._encoder.get()
        plain, images, sizes = images_in(prompt)
        media = await self._prepared(images, sizes)
        tokenizer = encoder.tokenizer
        if media is not None:
            # Texts of videos among token ids are short.
            plain = media.into_plain(plain, encoding(tokenizer))
        text = plain.get("prompt") if isinstance(plain, Mapping) else plain
        if tokenizer is None or not isinstance(text, str):
            found = read_prompt(plain, None)
        else:
            encoder.check(text)
            found = await encoder.with_tokenizer(partial(read_prompt, plain), len(text))
        return found if media is None else media.put_in(found)

    async def _prepared(self, images: Sequence[Given], sizes: Any) -> Media | None:
        """Returns images and videos for a prompt with these `mm_processor_kwargs`; None if there
        are none. Raises InvalidRequestError."""
        if self._preparer is None:
            self._preparer = Preparer.of(self.config, self._client.info.images, self._client.limits)
        return await self._preparer.prepare(images, sizes)

    async def _render(self, messages: ChatMessages, options: ChatOptions) -> Prompt:
        encoder, given = await self._encoder.get(), compose_options(options)
        messages, images = images_of(messages)
        media = await self._prepared(images, options.get("mm_processor_kwargs"))
        given["image_texts"] = [] if media is None else media.texts
        size = text_length([messages, given.get("tools")])
        rendered = await encoder.encode_chat(messages, size, given, is_cut=False)
        prompt = rendered_prompt(rendered, self.config.max_cache_marks, options.get("cache_salt"))
        return prompt if media is None else media.put_in(prompt)

    async def _answers(
        self,
        read: Callable[[], Awaitable[Prompt]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = sampling_params or await self.get_default_sampling_params()
        self._num_requests += 1
        id_ = f"request-{self._num_requests}" if request_id is None else request_id
        if id_ in self._running:
            raise InvalidRequestError(f"request_id={id_!r}: in use; give each request its own")
        running = self._running[id_] = _Running()
        try:
            growing = GrowingOutput(id_, prompt := await read(), params.n)
            if not running.is_aborted:
                running.stream = self._client.add([prompt], _sent(params), priority=priority)
                async for arrived in running.stream:
                    for _, output in arrived:
                        growing.take(output)
                    yield growing.output()
            if not growing.is_finished:
                growing.abort()
                yield growing.output()
        finally:
            del self._running[id_]
            if running.stream is not None:
                running.stream.close()


class _Running:
    """A request, before and after it is sent."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
        if self.stream is not None:
            self.stream.abort()


async def _load(client: EngineClient) -> Encoder:
    return Encoder(await start_with_tokenizer(client), client.limits.max_model_len)


def _sent(params: SamplingParams) -> SamplingParams:
    form = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=form.as_text)
