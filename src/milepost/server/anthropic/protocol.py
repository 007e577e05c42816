"""What the bodies of /v1/messages may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from milepost.server.fields import (
    MAX_INT,
    MAX_PARTS,
    Body,
    Count,
    Int64,
    Many,
    StopText,
    only,
    unread,
)
from milepost.server.parts import CacheControl
from milepost.server.protocol import MAX_MESSAGES, MAX_STOPS


class TextBlock(Body):
    """A block of a tool's result or of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


_NEEDS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "name",
    "tool_result": "tool_use_id",
}


class ContentBlock(Body):
    """A block of a message; which of its fields count, its type says."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | Annotated[Many[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    citations: Any = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> ContentBlock:
        needed = _NEEDS.get(self.type)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"a block of type {self.type!r} needs a {needed}")
        return self


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Many[ContentBlock], Field(max_length=MAX_PARTS)]


class CustomTool(Body):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Any = None
    input_examples: Any = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Any = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: what decides the prompt."""

    model: str | None = None
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[Many[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Many[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    mcp_servers: only([]) = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stop_sequences: Annotated[Many[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share cached prefixes only with those of the same salt."""
