"""The Python API: prompts in, outputs out, in the shape that vLLM users know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, Self, Unpack

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from milepost.engine.loop import Engine, EngineThread, RequestGroup
from milepost.engine.metrics import Metric
from milepost.engine.options import (
    CHAT_OPTIONS,
    ChatOptions,
    EngineOptions,
    read_options,
)
from milepost.engine.outputs import RequestOutput
from milepost.engine.prompts import (
    ChatMessages,
    Prompt,
    PromptLike,
    is_conversation,
    is_prompt,
    one_each,
)
from milepost.engine.reader import PromptReader
from milepost.engine.text import with_defaults
from milepost.errors import ConfigError, InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.vllm_keywords import GENERATE, with_vllm_keywords

logger = logging.getLogger(__name__)


class LLM:
    """Loads a model and generates. Options are the fields of `milepost.config.EngineConfig`, which
    `milepost generate --help` lists too; the arguments of vLLM's `LLM` are taken as they are
    (`engine.vllm_names`), or refused with what to do instead.

    Several threads may use one: their requests are served together. What ends one caller, such as
    Ctrl-C, ends no other's requests.

    Without a model the embedded one is used. Raises ConfigError, UnsupportedModelError,
    WeightsError.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        config = read_options(model, options)
        if config.max_queue_wait_s is not None:
            raise ConfigError(
                f"max_queue_wait_s={config.max_queue_wait_s:g}: prompts of one call wait for each "
                "other; set it on a server"
            )
        self.llm_engine = Engine(config)
        self._thread = EngineThread(self.llm_engine)
        self._reader = PromptReader(self.llm_engine)

    @with_vllm_keywords(GENERATE)
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers each prompt, in the order given.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`,
        and with `cache_marks` (positions where a state is worth keeping) and `cache_salt` (shares
        nothing with prompts under another) if wanted. `multi_modal_data` with `{"image": IMAGE}`,
        or a list of images, has images of Pillow's, URLs or files' bytes, one for each image token
        of the prompt, and `mm_processor_kwargs` their sizes; the argument of that name is for all
        prompts that have none. Parameters are for all prompts, or one for each; without them
        `get_default_sampling_params` has them. `use_tqdm` shows progress.

        Raises InvalidRequestError, naming the prompt, before anything is computed.
        """
        listed: list[Any] = [prompts] if is_prompt(prompts) else list(prompts)
        sizes = mm_processor_kwargs
        read = [self._reader.numbered(index, each, sizes) for index, each in enumerate(listed)]
        return self._run(read, sampling_params, use_tqdm)

    @with_vllm_keywords(GENERATE, CHAT_OPTIONS)
    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, whose messages are as OpenAI has them. The
        ends of the system prompt and of the last message become marks. `options` are those of
        `ChatOptions`; the rest is as in `generate`.

        Raises InvalidRequestError before anything is computed.
        """
        conversations: list[Any] = [messages] if is_conversation(messages) else list(messages)
        prompts = [self._reader.conversation(each, options) for each in conversations]
        return self._run(prompts, sampling_params, use_tqdm)

    @with_vllm_keywords(GENERATE)
    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields the growing answer to one prompt: each output holds all of it so far.

        Closing the iterator early ends the request.
        """
        return self._stream(self._reader.plain(prompt), sampling_params)

    @with_vllm_keywords(GENERATE, CHAT_OPTIONS)
    def stream_chat(
        self,
        messages: ChatMessages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """Like `stream`, for one conversation; options are those of `chat`."""
        return self._stream(self._reader.conversation(messages, options), sampling_params)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Returns the tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters used for prompts without any: the checkpoint's own defaults,
        unless generation_config="none"."""
        return with_defaults({}, self.llm_engine.sampling_defaults)

    def close(self) -> None:
        """Ends the engine, after writing pending items to `cache_dir` for at most
        `cache_flush_timeout_s`. So does the end of a `with` block, of the program, or of the last
        reference. Later calls raise EngineDeadError."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Drops all cached pages and states in memory, and with `reset_connector` those in
        `cache_dir` too. Returns False while requests are running."""
        reset = partial(self.llm_engine.reset_prefix_cache, reset_connector=reset_connector)
        return self._thread.run(reset)

    def get_metrics(self) -> list[Metric]:
        """Returns the current values of all counters and gauges."""
        return self._thread.run(self.llm_engine.get_metrics)

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if params is None else params
        return one_each(given, num_prompts)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(prompts))
        wanted = list(zip(prompts, params, strict=True))
        groups: list[RequestGroup] = []
        is_over = False
        try:
            with _bar(len(wanted), is_shown=use_tqdm) as advance:
                begin = partial(self._begin, wanted, groups)
                self._thread.finish(begin, groups, self.llm_engine.flush, advance)
            is_over = True
        finally:
            if not is_over:  # an interruption leaves nothing queued
                self._thread.tidy(self._give_up, groups)
        for group in groups:
            group.check_whole()
        if not self.llm_engine.config.disable_log_stats:
            self._log_stats()
        return [group.output() for group in groups]

    def _stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> Iterator[RequestOutput]:
        (params,) = self._params_for(sampling_params, 1)
        self._thread.run(self.llm_engine.check, prompt, params)
        return self._outputs(prompt, params)

    def _outputs(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Queues the prompt once the first output is asked for."""
        groups: list[RequestGroup] = []
        num_shown = 0
        try:
            self._thread.run(self._queue, [(prompt, params)], groups)
            (group,) = groups
            while not group.is_finished or num_shown < group.num_output_tokens:

                def is_enough(num: int = num_shown) -> bool:
                    return num < group.num_output_tokens or group.is_finished

                result = lambda: (group.num_output_tokens, group.output())  # noqa: E731
                found = self._thread.steps(is_enough, result)
                if found is not None and found[0] > num_shown:
                    num_shown, output = found
                    yield output
            group.check_whole()
        finally:
            self._thread.tidy(self._give_up, groups)

    def __reduce__(self) -> str:
        raise TypeError("an LLM cannot be copied or sent: make one in each process that needs it")

    # --- on the engine's thread -------------------------------------------------------------------

    def _begin(
        self, wanted: Sequence[tuple[Prompt, SamplingParams]], groups: list[RequestGroup]
    ) -> None:
        """Queues all prompts, or none if one of them raises InvalidRequestError."""
        for index, (prompt, params) in enumerate(wanted):
            try:
                self.llm_engine.check(prompt, params)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from error
        self._queue(wanted, groups)

    def _queue(
        self, wanted: Sequence[tuple[Prompt, SamplingParams]], groups: list[RequestGroup]
    ) -> None:
        """Queues prompts that have passed `check`. `groups` has those that are queued, also for a
        caller that no longer waits."""
        for prompt, params in wanted:
            groups.append(self.llm_engine.queue(prompt, params))

    def _give_up(self, groups: Sequence[RequestGroup]) -> None:
        """Aborts those of the groups that are still running."""
        for group in groups:
            if not group.is_finished:
                self.llm_engine.abort(group)
        self.llm_engine.flush()

    def _log_stats(self) -> None:
        stats = self.llm_engine.scheduler.cache.stats
        share = 100 * stats.hits / stats.queries if stats.queries else 0.0
        logger.info(
            "prefix cache: %d of %d prompt tokens reused (%.1f %%), %d checkpoints made, %d used",
            stats.hits,
            stats.queries,
            share,
            stats.checkpoints_made,
            stats.checkpoints_used,
        )


@contextmanager
def _bar(num_prompts: int, *, is_shown: bool) -> Iterator[Callable[[int], object]]:
    """Shows how many prompts are done. No bar is created if it would be hidden, since creating one
    costs as much as a prompt."""
    if not is_shown:
        yield lambda _: None
        return
    with tqdm(total=num_prompts, desc="prompts", dynamic_ncols=True) as bar:
        yield bar.update
