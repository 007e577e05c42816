"""Keywords of vLLM that are not ours, of `SamplingParams`, `StructuredOutputs` and the methods that
generate.

A keyword with a value that changes nothing is taken, so that scripts run as they are. One that
would change the answers is refused with what to do instead, and so is a misspelt one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from milepost.errors import InvalidRequestError

P = ParamSpec("P")
R = TypeVar("R")

Keywords = Mapping[str, tuple[Any, ...]]
"""For each keyword what to do instead, and values besides None that change nothing. Without an
instead every value is taken: nothing here needs it."""

_LEAVE_OUT = "leave it out"

SAMPLING: Keywords = {
    "best_of": ("use n, and choose among the answers", 1),
    "guided_decoding": ("use structured_outputs, such as StructuredOutputs(json=...)",),
    "logits_processors": ("use logit_bias, allowed_token_ids or bad_words", []),
    "use_beam_search": ("use n, and choose among the answers", False),
    "length_penalty": ("there is no beam search", 1.0),
    "early_stopping": ("there is no beam search", False),
    "truncate_prompt_tokens": ("shorten the prompt",),
    "output_kind": ("outputs hold the whole answer so far", 0),
    "flat_logprobs": ("log-probabilities are lists of mappings", False),
    "logprob_token_ids": ("use logprobs", []),
    "repetition_detection": ("use repetition_penalty, or stop",),
    "skip_reading_prefix_cache": ("give the prompt a cache_salt of its own", False),
    "spaces_between_special_tokens": ("use skip_special_tokens=True, or decode the ids", True),
    "extra_args": (_LEAVE_OUT, {}),
    "skip_clone": (),
    "output_text_buffer_length": (),
}
STRUCTURED: Keywords = {
    "json_object": ('use json={"type": "object"}', False),
    "structural_tag": ("use grammar",),
    "whitespace_pattern": ("use grammar",),
    "disable_any_whitespace": ("use grammar", False),
    "disable_additional_properties": ('say "additionalProperties": false in the schema', False),
    "disable_fallback": (),
    "backend": (),
}
GENERATE: Keywords = {
    "lora_request": ("merge the adapter into the weights",),
    "prompt_token_ids": ('pass {"prompt_token_ids": [...]} as the prompt',),
    "guided_options_request": ("use SamplingParams(structured_outputs=...)",),
    "tokenization_kwargs": ('pass {"prompt_token_ids": [...]} as the prompt', {}),
    "mm_processor_kwargs": ('pass {"prompt": ..., "mm_processor_kwargs": ...}', {}),
    "prompt_text": ("pass the text as the prompt",),
    "data_parallel_rank": ("use one engine for each GPU", 0),
    "priority": ("prompts of one LLM are served in their order; see AsyncLLM.generate", 0),
    "chat_template_content_format": (),
    "trace_headers": (),
    "reasoning_ended": (),
}


def with_vllm_keywords(
    keywords: Keywords, also: Iterable[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a call answer for these keywords. `also` names those that it takes as `**options`. The
    call then raises InvalidRequestError for keywords that it does not support."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(call).parameters.values()
        options = [
            p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
        ]
        names = {*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), *also}
        known = [*options, *also]

        @functools.wraps(call)
        def answering(*args: P.args, **given: P.kwargs) -> R:
            for name in given.keys() - names:
                _judge(name, given.pop(name), keywords, known)
            return call(*args, **given)

        return answering

    return decorate


def _judge(name: str, value: Any, keywords: Keywords, known: list[str]) -> None:
    if name not in keywords:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
        raise InvalidRequestError(f"{name}={value!r}: {name!r} is unknown: {hint}")
    if not keywords[name] or value is None:
        return
    instead, *without_effect = keywords[name]
    if getattr(value, "value", value) not in without_effect:
        raise InvalidRequestError(f"{name}={value!r} is not supported: {instead}")
