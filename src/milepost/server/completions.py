"""POST /v1/completions, with what a completion reports about its own prompt: `echo` and
`prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.processes import Delta
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.server import forms, logprobs, parameters, transfer
from milepost.server.conversation import response_id, shortened
from milepost.server.generation import ChoicesWriter, Generation
from milepost.server.protocol import CompletionRequest
from milepost.server.service import Service
from milepost.server.stream import send
from milepost.structured_outputs import StructuredOutputs


async def complete(service: Service, request: CompletionRequest, http: Request) -> Response:
    """Answers prompts as they stand."""
    model = service.check_model(request.model)
    request = transfer.as_served(service, request)
    form = forms.of_request(request)
    prompts, params = await asked(service, request, form)
    texts = await _texts_of(service, request, prompts)
    generation = Generation(  # last, because it must be closed
        service,
        request,
        prompts,
        params,
        scope=http.scope,
        field="prompt",
        is_counted=request.max_tokens != 0,
    )
    await generation.begun()
    id_ = response_id("cmpl", request, http)
    writer = _CompletionWriter(service, request, prompts, texts, generation, model, id_)
    return await send(writer, http, generation.close, is_stream=request.stream)


async def asked(
    service: Service, request: CompletionRequest, form: StructuredOutputs | None = None
) -> tuple[list[Prompt], SamplingParams]:
    """Returns the prompts of a request as they will be served, and their parameters, with a form
    that the answers must match."""
    params = forms.apply(parameters.of_completion(request, service.sampling_defaults), form)
    params = await service.checked(params, forms.field_of(request))
    service.client.check_room(num_prompts(request), params.n)  # before tokenizing
    marks = tuple(request.cache_marks or ())
    salt = request.cache_salt or ""
    listed = _listed(request)
    if marks and len(listed) > 1:
        raise InvalidRequestError(f"cache_marks={list(marks)!r}: use it with a single prompt")
    transfers = transfer.of_each(request.kv_transfer_params, len(listed))
    texts = [prompt for prompt in listed if isinstance(prompt, str)]
    encoded: list[Any] = listed
    if texts:
        encoded = await service.encoder.encode(
            texts,
            is_cut=request.truncate_prompt_tokens is not None,
            add_special_tokens=request.add_special_tokens is not False,
        )
    prompts = [
        Prompt(
            token_ids=ids,
            cache_salt=salt,
            cache_marks=marks,
            kv_transfer_params=params_of_it,
        )
        for ids, params_of_it in zip(encoded, transfers, strict=True)
    ]
    limit = service.client.limits.max_model_len
    return [shortened(prompt, request, params, limit) for prompt in prompts], params


def num_prompts(request: CompletionRequest) -> int:
    return len(_listed(request))


def _listed(request: CompletionRequest) -> list[Any]:
    """Returns the prompts, each as text or token ids."""
    given: Any = request.prompt
    is_one = not isinstance(given, list) or isinstance(given[0], int)
    return [given] if is_one else given


class _CompletionWriter(ChoicesWriter):
    """Writes the response."""

    event_object = "text_completion"

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        prompts: list[Prompt],
        texts: list[str] | None,
        generation: Generation,
        model: str,
        id_: str,
    ) -> None:
        super().__init__(service, request, generation, id_, model)
        self._request = request
        self._texts = texts
        self._prompts = prompts
        self._offsets = [0] * generation.num_choices

    async def whole(self) -> dict[str, Any]:
        choices = [self._choice(index) for index in range(self._generation.num_choices)]
        pieces: list[list[str]] = [[] for _ in choices]
        async for deltas in self._generation.deltas():
            for index, delta in deltas:
                pieces[index].append(delta.text)
                self._extend(choices[index], delta)
        for choice, texts in zip(choices, pieces, strict=True):
            choice["text"] = "".join(texts)
        if self._texts is not None or self._request.prompt_logprobs is not None:
            for number in range(len(self._prompts)):
                of_prompt = [
                    choice for choice in choices if self._number(choice["index"]) == number
                ]
                await self._add_prompt(number, of_prompt)
        body = {**self._head(self.event_object), "choices": choices, "usage": self._usage()}
        return {**body, **self._generation.transfer()}

    def _choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the choice to send for a delta, or none."""
        is_first = index not in self._begun
        choice = self._choice(index)
        self._extend(choice, delta)
        echoed = self._texts[self._number(index)] if is_first and self._texts else ""
        choice["text"] = echoed + delta.text
        return [choice] if _says_something(choice) else []

    async def _add_prompt(self, number: int, choices: Sequence[dict[str, Any]]) -> None:
        """Adds to finished choices what they report about their prompt."""
        wanted, scores = self._request.prompt_logprobs, None
        if number in self._generation.prompt_logprobs:
            scores = await logprobs.scores_of(self._service, self._generation, number)
        for choice in choices:
            if wanted is not None and scores is not None:
                choice["prompt_logprobs"] = logprobs.of_prompt(scores, wanted)
            if self._texts is not None:
                text = self._texts[number]
                _begin_with(choice, self._request, self._prompts[number], text, scores)

    def _choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        is_first = index not in self._begun
        self._begun.add(index)
        if self._request.return_token_ids:
            choice["token_ids"] = []
            if is_first:
                choice["prompt_token_ids"] = self._prompts[self._number(index)].token_ids
        return choice

    def _number(self, index: int) -> int:
        """Returns the index of the prompt that a choice answers."""
        return index // (self._generation.num_choices // len(self._prompts))

    def _extend(self, choice: dict[str, Any], delta: Delta) -> None:
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] += delta.token_ids
        if delta.logprobs is not None:
            index, num_top = choice["index"], self._request.logprobs or 0
            known, offset = choice["logprobs"], self._offsets[index]
            if self._request.return_tokens_as_token_ids:
                delta = logprobs.by_id(delta)
            choice["logprobs"], self._offsets[index] = logprobs.extend_completion(
                known, delta, num_top, offset
            )


def _says_something(choice: dict[str, Any]) -> bool:
    return bool(
        choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
    )


# --- the prompt of a choice ----------------------------------------------------------------------


async def _texts_of(
    service: Service, request: CompletionRequest, prompts: Sequence[Prompt]
) -> list[str] | None:
    """Returns the prompts as text, or None unless they were asked for."""
    if not request.echo:
        return None
    return await service.encoder.with_tokenizer(
        lambda tokenizer: [str(tokenizer.decode(list(prompt.token_ids))) for prompt in prompts],
        sum(len(prompt.token_ids) for prompt in prompts),
    )


def _begin_with(
    choice: dict[str, Any],
    request: CompletionRequest,
    prompt: Prompt,
    text: str,
    scores: Sequence[logprobs.Entry | None] | None,
) -> None:
    """Puts a prompt before an answer; with max_tokens=0 only the prompt remains."""
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
