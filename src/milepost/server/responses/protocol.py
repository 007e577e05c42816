"""What the bodies of /v1/responses may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from milepost.server.fields import MAX_INT, MAX_PARTS, Body, Int64, Many, only, unread
from milepost.server.protocol import MAX_MESSAGES


class ContentPart(Body):
    """A part of a message, of a tool's output or of a reasoning item."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.text is None and self.refusal is None:
            raise ValueError(f"a part of type {self.type!r} needs its text")
        return self


Parts = Annotated[Many[ContentPart], Field(max_length=MAX_PARTS)]

_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Body):
    """An item of the input; which of its fields count, its type says."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Any = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    phase: Any = None
    call_id: str | None = None
    name: str | None = None
    namespace: only() = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: Any = None

    @model_validator(mode="after")
    def _has_its_own(self) -> InputItem:
        for name in _NEEDS[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type!r} needs {name}")
        return self


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseStreamOptions(Body):
    include_obfuscation: Any = None


class ResponsesRequest(Body):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[Many[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    """True (the default): keep the response, for previous_response_id and GET."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = None
    metadata: dict[str, Any] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    # Said to the service, not to the model.
    service_tier: str | None = None
    safety_identifier: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """What a router carries between an engine that prefills and one that decodes."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    truncation: Literal["disabled"] | None = None
    background: only(False) = None
    conversation: only() = None
    prompt: only() = None
    max_tool_calls: Any = None
    """Counts the calls of tools that a server runs; none are run here."""

    # As in chat.
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
