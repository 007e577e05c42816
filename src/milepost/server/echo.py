"""What a completion reports about its own prompt: `echo` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.engine.prompts import Prompt
from milepost.server import logprobs
from milepost.server.generation import Generation
from milepost.server.protocol import CompletionRequest
from milepost.server.service import Service


async def texts_of(
    service: Service, request: CompletionRequest, prompts: Sequence[Prompt]
) -> list[str] | None:
    """The prompts as text, one by one; None if nobody asked for them."""
    if not request.echo:
        return None
    return await service.encoder.with_tokenizer(
        lambda tokenizer: [tokenizer.decode(prompt.token_ids) for prompt in prompts],
        sum(len(prompt.token_ids) for prompt in prompts),
    )


async def scores_of(
    service: Service, generation: Generation, number: int
) -> list[logprobs.Entry | None]:
    """How likely the tokens of a prompt were, with their texts."""
    entries = generation.prompt_logprobs[number]
    if service.tokenizer is None:
        return entries
    size = sum(map(len, filter(None, entries)))
    return await service.encoder.with_tokenizer(
        lambda tokenizer: logprobs.with_texts(entries, tokenizer), size
    )


async def finish(
    service: Service,
    request: CompletionRequest,
    prompts: Sequence[Prompt],
    texts: Sequence[str] | None,
    generation: Generation,
    choices: Sequence[dict[str, Any]],
) -> None:
    """Add to whole choices what they say of their prompts."""
    if texts is None and request.prompt_logprobs is None:
        return
    num_answers = len(choices) // len(prompts)
    for number, prompt in enumerate(prompts):
        own = choices[number * num_answers : (number + 1) * num_answers]
        scores = None
        if number in generation.prompt_logprobs:
            scores = await scores_of(service, generation, number)
        for choice in own:
            if request.prompt_logprobs is not None and scores is not None:
                choice["prompt_logprobs"] = logprobs.of_prompt(scores, request.prompt_logprobs)
            if texts is not None:
                _begin_with(choice, request, prompt, texts[number], scores)


def _begin_with(
    choice: dict[str, Any],
    request: CompletionRequest,
    prompt: Prompt,
    text: str,
    scores: Sequence[logprobs.Entry | None] | None,
) -> None:
    """Put a prompt before an answer; of max_tokens=0 nothing else is left."""
    if request.max_tokens == 0:
        choice["text"], choice["logprobs"] = "", None
    choice["text"] = text + choice["text"]
    if request.logprobs is None or scores is None:
        return
    rest = "".join(logprobs.text_of(entry) for entry in scores if entry is not None)
    first = text.removesuffix(rest) if rest else text
    answer = choice["logprobs"]
    choice["logprobs"], offset = logprobs.echoed(
        prompt.token_ids,
        scores,
        first,
        request.logprobs,
        is_by_id=bool(request.return_tokens_as_token_ids),
    )
    for name, values in (answer or {}).items():
        if name == "text_offset":
            values = [value + offset for value in values]
        choice["logprobs"][name] += values
