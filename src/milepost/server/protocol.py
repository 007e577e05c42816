"""What the bodies of requests may hold.

Every field of OpenAI's API stands here, and vLLM's own. One that we do not support takes only
values that do not change the answer; others are refused by name. A field that nobody knows is kept
as an extra until `unknown.py` takes it out and tells of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from milepost.server.bodies import STOP_AT_FIRST

MAX_MESSAGES = 16384
MAX_PARTS = 8192
MAX_BIASES = 1024
MAX_STOPS = 64
MAX_STOP_LEN = 1024
MAX_INT = 2**63 - 1

T = TypeVar("T")
Many = Annotated[list[T], STOP_AT_FIRST]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]


def only(*values: Any) -> Any:
    """The type of a field that is not supported: null, or a value that asks for nothing."""

    def check(value: Any) -> Any:
        if any(type(value) is type(allowed) and value == allowed for allowed in (None, *values)):
            return value
        raise ValueError("this is not supported: leave the field out")

    schema = {"enum": [None, *values], "description": "Not supported beyond these values."}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def instead(name: str) -> Any:
    """The type of a field whose place another one has taken."""

    def check(value: Any) -> Any:
        if value is None:
            return value
        raise ValueError(f"use {name}")

    schema = {"enum": [None], "description": f"Not supported; use {name}."}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


class Body(BaseModel):
    """JSON types are taken as they are: no number in a string."""

    model_config = ConfigDict(extra="allow", strict=True)


# --- parts ----------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool | None = None
    """End the stream with a chunk that has `usage`."""
    continuous_usage_stats: bool | None = None
    """With include_usage, every chunk has the usage so far."""
    include_obfuscation: Any = None


class CacheControl(Body):
    """A breakpoint: the state at the end of this part is worth keeping."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextPart(Body):
    """Text, or what an assistant said in place of an answer, which counts as text."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> TextPart:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise ValueError(f"a part of type {self.type!r} needs a {self.type}")
        return self


class FunctionCall(Body):
    name: str
    arguments: str | None = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[Many[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: CacheControl | None = None
    refusal: str | None = None
    audio: only() = None
    function_call: only() = None
    annotations: Any = None
    """Clients send back what they were sent; it says nothing to the model."""

    @model_validator(mode="after")
    def _has_something(self) -> Message:
        if self.content is None and not (self.role == "assistant"):
            raise ValueError(f"a message of role {self.role!r} needs a content")
        return self


Messages = Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class StructuredOutputs(Body):
    """vLLM's field: the form of the answer, exactly one."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark."""
    json_object: bool | None = None
    structural_tag: only() = None
    disable_any_whitespace: Any = None
    disable_additional_properties: only(False) = None
    whitespace_pattern: only() = None


# --- requests -------------------------------------------------------------------------------------


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it has {len(value)} token ids: use {MAX_BIASES} or fewer")
    return value


class Sampling(Body):
    """What completions and chat have in common. Limits of values stand in SamplingParams."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    stop: StopText | Annotated[Many[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    """Token id, as a string, to what is added to its logit."""
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """Keep so many of the prompt's tokens; -1 for as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end is cut; the left one if nothing is said."""
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Becomes a part of the response's id."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share cached prefixes only with those of the same salt."""
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    """Lower goes first."""
    return_token_ids: bool | None = None
    """Add the token ids of the prompt and of the answers."""
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Goes to the access log."""
    kv_transfer_params: dict[str, Any] | None = None
    """What a router carries between an engine that prefills and one that decodes."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """How likely the prompt's tokens were, with so many alternatives each; not in streams."""

    # Said to the service, not to the model.
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    # What would change the answer, and is not done here.
    use_beam_search: only(False) = None
    length_penalty: only(1, 1.0) = None
    allowed_token_ids: only([]) = None
    bad_words: only([]) = None
    logit_processors: only([]) = None
    logits_processors: only([]) = None
    logprob_token_ids: only([]) = None
    return_tokens_as_token_ids: only(False) = None
    spaces_between_special_tokens: only(True) = None
    thinking_token_budget: only() = None
    repetition_detection: only() = None
    prompt_embeds: only() = None
    guided_json: instead("structured_outputs.json") = None
    guided_regex: instead("structured_outputs.regex") = None
    guided_choice: instead("structured_outputs.choice") = None
    guided_grammar: instead("structured_outputs.grammar") = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: only() = None
    structural_tag: only() = None

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
            raise ValueError("prompt_logprobs does not go with stream=true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self


def _kind_of_prompt(value: Any) -> str:
    """Tells by the first element which of the four was meant, so that only that one is tried."""
    if not isinstance(value, list):
        return "one text"
    first = value[0] if value else None
    return {str: "texts", list: "lists of token ids"}.get(type(first), "one list of token ids")


Prompts = Annotated[
    Annotated[str, Tag("one text")]
    | Annotated[Many[str], Field(min_length=1), Tag("texts")]
    | Annotated[Many[TokenId], Field(min_length=1), Tag("one list of token ids")]
    | Annotated[
        Many[Annotated[Many[TokenId], Field(min_length=1)]],
        Field(min_length=1),
        Tag("lists of token ids"),
    ],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Count | None = 16
    """0 goes with echo."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_marks: Many[Annotated[int, Field(ge=1, le=MAX_INT)]] | None = None
    """Token positions in the prompt at which a state is worth keeping; for a single prompt."""
    echo: bool | None = None
    """Begin the text with the prompt, and the logprobs with the prompt's."""
    best_of: only(1) = None
    suffix: only("") = None

    @model_validator(mode="after")
    def _answers_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 goes with echo=true")
        if self.stream and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            raise ValueError("echo with logprobs or max_tokens=0 does not go with stream=true")
        return self


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: an answer has one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message in place of beginning one."""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """Goes to the chat template, if it reads it; `none` also as `enable_thinking`."""
    include_reasoning: bool | None = None
    """False: leave the reasoning out of the response."""
    chat_template: only() = None
    documents: only([]) = None
    echo: only(False) = None
    modalities: only(["text"]) = None
    audio: only() = None
    web_search_options: only() = None
    functions: only([]) = None
    function_call: only("none", "auto") = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: use one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt: use one of them")
        _check_tool_choice(self)
        return self


def _check_tool_choice(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise ValueError("tool_choice needs tools")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise ValueError(f"tool_choice names {choice.function.name!r}, which is not in tools")


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Many[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Many[TokenId]


def field_names() -> frozenset[str]:
    """Every name that a field of some body has."""
    names: set[str] = set()
    kinds = [Body]
    while kinds:
        kind = kinds.pop()
        names.update(field.alias or name for name, field in kind.model_fields.items())
        kinds += kind.__subclasses__()
    return frozenset(names)
