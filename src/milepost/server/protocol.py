"""Bodies of requests.

They have every field of OpenAI's API, and vLLM's own. A field that is not supported accepts only
values that do not change the answer; others are refused by name. An unknown field is kept as an
extra until `unknown.py` removes and reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from milepost.server.fields import (
    Alternatives,
    Body,
    Count,
    Int64,
    Many,
    Only,
    Positive,
    Renamed,
    StopText,
    TokenId,
    TokenIds,
    ToolList,
    Unread,
)
from milepost.server.parts import (
    AnswerFields,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputsField,
)
from milepost.server.tools import NamedToolChoice, Tool

MAX_MESSAGES = 16384
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_STOPS = 64
Messages = Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it has {len(value)} token ids: use {MAX_BIASES} or fewer")
    return value


class Sampling(AnswerFields):
    """Fields that completions and chat share. SamplingParams checks the limits of values."""

    n: Positive | None = None
    stop: StopText | Annotated[Many[StopText], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    """Maps token ids, as strings, to values added to their logits."""
    allowed_token_ids: Annotated[Many[TokenId], Field(max_length=MAX_BIASES)] | None = None
    """The only tokens that may be sampled."""
    bad_words: Annotated[Many[StopText], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that must not appear in the answer."""
    thinking_token_budget: Count | None = None
    """Largest number of reasoning tokens."""
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Has no effect: nothing is ever put between tokens."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    """Number of prompt tokens to keep; -1 keeps as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut; by default the left one."""
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Becomes part of the response's id."""
    return_token_ids: bool | None = None
    """Adds the token ids of the prompt and the answers."""
    return_tokens_as_token_ids: bool | None = None
    """Writes the tokens of `logprobs` as `token_id:5` rather than as text."""
    prompt_logprobs: Alternatives | None = None
    """Log-probabilities of the prompt's tokens, with this many alternatives; not in streams."""

    # Meant for the service rather than the model.
    store: Annotated[bool | None, Unread(False)] = None
    metadata: Annotated[dict[str, Any] | None, Unread()] = None

    # Would change the answer, and not supported.
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1, 1.0)] = None
    logit_processors: Annotated[Any, Only([])] = None
    logits_processors: Annotated[Any, Only([])] = None
    logprob_token_ids: Annotated[Any, Only([])] = None
    repetition_detection: Annotated[Any, Only()] = None
    prompt_embeds: Annotated[Any, Only()] = None
    guided_json: Annotated[Any, Renamed("structured_outputs.json")] = None
    guided_regex: Annotated[Any, Renamed("structured_outputs.regex")] = None
    guided_choice: Annotated[Any, Renamed("structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, Renamed("structured_outputs.grammar")] = None
    regex: Annotated[Any, Renamed("structured_outputs.regex")] = None  # SGLang's
    ebnf: Annotated[Any, Renamed("structured_outputs.grammar")] = None  # SGLang's
    guided_decoding_backend: Annotated[Any, Unread()] = None
    guided_whitespace_pattern: Annotated[Any, Only()] = None
    structural_tag: Annotated[Any, Only()] = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) < 11):
                raise ValueError(f"key {key!r}: use token ids")
        return value

    @model_validator(mode="after")
    def _options_need_stream(self) -> Sampling:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be combined with stream=true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self


def _kind_of_prompt(value: Any) -> str:
    """Chooses one of the four kinds by the first element, so that only that one is validated."""
    if not isinstance(value, list):
        return "one text"
    first = value[0] if value else None
    kinds: dict[type, str] = {str: "texts", list: "lists of token ids"}
    return kinds.get(type(first), "one list of token ids")


Prompts = Annotated[
    Annotated[str, Tag("one text")]
    | Annotated[Many[str], Field(min_length=1), Tag("texts")]
    | Annotated[TokenIds, Field(min_length=1), Tag("one list of token ids")]
    | Annotated[
        Many[Annotated[TokenIds, Field(min_length=1)]],
        Field(min_length=1),
        Tag("lists of token ids"),
    ],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Count | None = 16
    """0 is allowed with echo."""
    logprobs: Alternatives | None = None
    cache_marks: Many[Positive] | None = None
    """Token positions in a single prompt where a state is worth keeping."""
    add_special_tokens: bool | None = None
    """False leaves out the beginning-of-sequence token before prompts that are text."""
    echo: bool | None = None
    """Begins the text with the prompt, and the logprobs with the prompt's."""
    best_of: Annotated[Any, Only(1)] = None
    suffix: Annotated[Any, Only("")] = None

    @model_validator(mode="after")
    def _answers_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true")
        if self.stream and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            raise ValueError(
                "echo with logprobs or max_tokens=0 cannot be combined with stream=true"
            )
        return self


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False allows one call per answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continues the last message rather than beginning a new one."""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """Passed to the chat template if it reads it; `none` also as `enable_thinking`."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the response."""
    documents: Annotated[Many[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    """Passed to the chat template, which must read them."""
    chat_template: Annotated[Any, Only()] = None
    add_special_tokens: Annotated[Any, Only(False)] = None
    echo: Annotated[Any, Only(False)] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only([], hint="use tools")] = None
    function_call: Annotated[Any, Only("none", "auto", hint="use tool_choice")] = None
    media_io_kwargs: Annotated[Any, Unread()] = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: use one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt: use one of them")
        _check_tool_choice(self)
        return self


def _check_tool_choice(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    tools = [tool.definition for tool in request.tools or ()]
    names = {tool.name for tool in tools if tool is not None}
    if not names:
        aside = "; types other than function and custom are left out" if tools else ""
        raise ValueError(f"tool_choice needs tools{aside}")
    if isinstance(choice, NamedToolChoice):
        for name in choice.names:
            if name is not None and name not in names:
                raise ValueError(f"tool_choice names {name!r}, which is not in tools")
        if all(name is None for name in choice.names):
            raise ValueError("tool_choice allows no tool that can be called here")


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    """Applies to a prompt; a chat template writes its own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def changed(self) -> Iterator[str]:
        others = _OF_MESSAGES if self.prompt is not None else _OF_A_PROMPT
        for name in others & self.model_fields_set:
            if getattr(self, name) not in (None, False, [], {}):
                yield name


_OF_A_PROMPT = frozenset(("add_special_tokens",))
_OF_MESSAGES = frozenset((
    "tools", "chat_template_kwargs", "mm_processor_kwargs", "add_generation_prompt",
    "continue_final_message",
))  # fmt: skip


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


def _kind_of_body(value: Any) -> str:
    is_chat = "messages" in value if isinstance(value, dict) else isinstance(value, ChatRequest)
    return "a chat" if is_chat else "a completion"


Invocation = Annotated[
    Annotated[ChatRequest, Tag("a chat")] | Annotated[CompletionRequest, Tag("a completion")],
    Discriminator(_kind_of_body),
]
"""POST /invocations: a body with messages is a chat request."""


def field_names() -> frozenset[str]:
    """Returns the names of all fields of all bodies."""
    names: set[str] = set()
    kinds = [Body]
    while kinds:
        kind = kinds.pop()
        names.update(field.alias or name for name, field in kind.model_fields.items())
        kinds += kind.__subclasses__()
    return frozenset(names)
