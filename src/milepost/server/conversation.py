"""Turns a chat request into running answers, for all endpoints with messages."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.server import forms, parameters, transfer
from milepost.server.answers import AnswerParser
from milepost.server.generation import Generation
from milepost.server.logprobs import TokenBytes
from milepost.server.messages import tools_for_template, toolset_of, with_effort
from milepost.server.parts import TextPart
from milepost.server.protocol import ChatRequest, Sampling
from milepost.server.service import Service

MAX_ID_LEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """The running answers to one conversation."""

    request: ChatRequest
    """The request as it is served."""
    prompt: Prompt
    generation: Generation
    answers: list[AnswerParser]
    octets: TokenBytes | None
    """The bytes of the vocabulary, if the answers report log-probabilities."""

    def usage(self) -> dict[str, Any]:
        """Returns the usage so far, with the number of reasoning tokens."""
        usage = self.generation.usage()
        details = usage.get("completion_tokens_details", {})
        count = sum(answer.num_reasoning_tokens for answer in self.answers)
        return {**usage, "completion_tokens_details": {**details, "reasoning_tokens": count}}


async def begin(
    service: Service,
    request: ChatRequest,
    http: Request,
    *,
    field: str,
    fits_max_tokens: bool = False,
) -> ChatTurn:
    """Renders, checks and submits a conversation. `field` is named in errors about the prompt; with
    `fits_max_tokens` a larger max_tokens is lowered to what max_model_len leaves.

    Raises the errors of these steps. The caller closes the generation of the ChatTurn.
    """
    request = transfer.as_served(service, request)
    octets = await service.token_bytes() if request.logprobs else None
    tools = toolset_of(request)
    prompt, params = await asked(service, request, http, fits_max_tokens=fits_max_tokens)
    if service.reads_special_tokens(has_tools=bool(tools.callable)):
        params = replace(params, skip_special_tokens=False)
    is_open = service.format.is_open(prompt.text or "", _begun(request))
    if params.stop and service.reasoning_tokens is not None:
        params = replace(params, reasoning=replace(service.reasoning_tokens, is_open=is_open))
    if request.response_format or request.structured_outputs or tools.callable:
        form = await service.encoder.with_tokenizer(
            lambda tokenizer: forms.of_chat(
                request, tools, service.format, tokenizer, is_open=is_open
            )
        )
        params = await service.checked(forms.apply(params, form), forms.field_of(request))
    has_one_call = request.parallel_tool_calls is False
    answers = [
        AnswerParser(
            parser,
            has_reasoning=request.include_reasoning is not False,
            has_one_call=has_one_call,
            customs=tools.customs,
            end_of_reasoning=service.end_of_reasoning,
        )
        for parser in service.format.parsers(params.n, tools=tools.callable, is_open=is_open)
    ]
    generation = Generation(  # last, because it must be closed
        service,
        request,
        [prompt],
        params,
        scope=http.scope,
        field=field,
        is_enough=(lambda index: answers[index].is_enough) if has_one_call else None,
    )
    await generation.begun()
    return ChatTurn(
        request=request,
        prompt=prompt,
        generation=generation,
        answers=answers,
        octets=octets,
    )


def _begun(request: ChatRequest) -> str:
    """Returns the text that the answer continues."""
    if not request.continue_final_message:
        return ""
    content = request.messages[-1].content or ""
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content if isinstance(part, TextPart))


async def asked(
    service: Service, request: ChatRequest, http: Request, *, fits_max_tokens: bool = False
) -> tuple[Prompt, SamplingParams]:
    """Returns the prompt as it will be served, with the text of the whole conversation, and its
    parameters."""
    params = parameters.of_chat(request, service.sampling_defaults)
    service.client.check_room(1, params.n)  # before rendering
    rendered = await render(service, request, http)
    prompt = replace(
        rendered,
        cache_salt=request.cache_salt or "",
        cache_marks=rendered.cache_marks[: service.client.config.max_cache_marks],
        kv_transfer_params=request.kv_transfer_params,
    )
    limit = service.client.limits.max_model_len
    prompt = shortened(prompt, request, params, limit)
    if fits_max_tokens and params.max_tokens is not None:
        room = max(limit - len(prompt.token_ids), 1)
        params = replace(params, max_tokens=min(params.max_tokens, room))
    return prompt, params


async def render(
    service: Service, request: ChatRequest, http: Request, *, is_counted: bool = False
) -> Prompt:
    """Renders a conversation; with `is_counted` it may be too long for the model."""
    return await service.render(
        request,
        tools=_shown_tools(service, request),
        template_kwargs=template_kwargs(service, request, http.scope),
        documents=request.documents,
        is_cut=is_counted or request.truncate_prompt_tokens is not None,
    )


async def count(service: Service, request: ChatRequest, http: Request) -> int:
    """Returns the number of a conversation's tokens."""
    return len((await render(service, request, http, is_counted=True)).token_ids)


def _shown_tools(service: Service, request: ChatRequest) -> list[dict[str, Any]] | None:
    """Returns the tools that the prompt lists, by default even if none may be called: they stand
    before the conversation, and without them none of it would be in the cache."""
    if request.tool_choice == "none" and service.config.exclude_tools_when_tool_choice_none:
        return None
    return tools_for_template(request.tools)


def template_kwargs(service: Service, request: ChatRequest, scope: Any) -> dict[str, Any]:
    """Returns the template's arguments. An effort that the template does not read counts as
    ignored."""
    variables, given = service.template_variables, request.chat_template_kwargs or {}
    found = with_effort(given, request.reasoning_effort, variables)
    if request.reasoning_effort is not None and len(found) == len(given):
        service.unknown.tell(["reasoning_effort"], scope)
    return found


def response_id(kind: str, request: Sampling, http: Request) -> str:
    """Returns the id of a response, made from the request's own id if it has one."""
    given_id = http.headers.get("x-request-id") or request.request_id or uuid.uuid4().hex
    return f"{kind}-{given_id[:MAX_ID_LEN]}"


def shortened(
    prompt: Prompt, request: Sampling, params: SamplingParams, max_model_len: int
) -> Prompt:
    """Returns the part of a prompt that `truncate_prompt_tokens` keeps, with its marks moved
    along."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return prompt
    if prompt.pictures:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={limit}: a prompt with images is not cut: leave it out"
        )
    if limit == -1:
        limit = max(max_model_len - (params.max_tokens or 1), 1)
    num_cut = max(len(prompt.token_ids) - limit, 0)
    keeps_start = request.truncation_side == "right"
    start = 0 if keeps_start else num_cut
    end = len(prompt.token_ids) - (num_cut if keeps_start else 0)
    marks = (mark - start for mark in prompt.cache_marks if start < mark <= end)
    return replace(prompt, token_ids=prompt.token_ids[start:end], cache_marks=tuple(marks))
