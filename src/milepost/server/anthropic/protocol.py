"""Bodies of /v1/messages. The blocks of their messages are in `blocks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from milepost.server.anthropic.blocks import ContentBlock, TextBlock
from milepost.server.fields import (
    MAX_PARTS,
    Body,
    Count,
    Int64,
    Many,
    Only,
    Positive,
    StopText,
    ToolList,
    Unread,
)
from milepost.server.parts import CacheControl
from milepost.server.protocol import MAX_MESSAGES, MAX_STOPS


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Many[ContentBlock], Field(max_length=MAX_PARTS)]


class ClientTool(Body):
    """A tool with a schema that the client runs. Tools of other types, which a server runs or only
    some models know, are left out."""

    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    type: Annotated[str | None, Field(max_length=64)] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Any = None
    """Arguments are always streamed as they come."""
    input_examples: Annotated[Any, Unread()] = None
    defer_loading: Annotated[bool | None, Unread(False)] = None
    allowed_callers: Annotated[Any, Unread()] = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _has_its_own(self) -> ClientTool:
        if self.is_custom and (self.name is None or self.input_schema is None):
            raise ValueError("a tool needs name and input_schema")
        if not self.is_custom:
            self.__pydantic_extra__ = {}
        return self

    def left_out(self) -> Iterator[str]:
        if not self.is_custom:
            yield str(self.type)


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Annotated[Literal["summarized", "updates", "omitted"] | None, Unread(("omitted",))] = (
        None
    )
    """`omitted` leaves the thinking out of the response."""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: the fields that decide the prompt."""

    model: str | None = None
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[Many[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: ToolList[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Former name of `output_config.format`."""
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[Any, Unread()] = None
    thread: Annotated[Any, Only(hint="send the whole conversation")] = None
    compaction: Annotated[Any, Only(hint="ask for a summary in a message")] = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: Positive
    stop_sequences: Annotated[Many[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: dict[str, Any] | None = None
    """Its `user_id` is written to the access log."""
    service_tier: Annotated[str | None, Unread("auto", "standard_only")] = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
