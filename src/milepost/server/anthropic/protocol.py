"""Bodies of /v1/messages, and the blocks of their messages, system prompts and tool results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from milepost.server.fields import (
    MAX_PARTS,
    AnyType,
    Body,
    Count,
    Int64,
    Many,
    Positive,
    StopText,
    Unread,
    tagged,
)
from milepost.server.parts import CacheControl
from milepost.server.protocol import MAX_MESSAGES, MAX_STOPS
from milepost.server.tools import read_arguments


class _MarkedBlock(Body):
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Unread()] = None


class TextBlock(_MarkedBlock):
    type: Literal["text"]
    text: str

    @property
    def plain(self) -> str:
        """The block as text."""
        return self.text


class SearchResultBlock(_MarkedBlock):
    """A result of a search that the client made."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[Many[TextBlock], Field(max_length=MAX_PARTS)]

    @property
    def plain(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class DocumentBlock(_MarkedBlock):
    """A document that is text."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> DocumentBlock:
        if self.source.get("type") != "text" or not isinstance(self.source.get("data"), str):
            raise ValueError("only documents whose source is text are served")
        return self

    @property
    def plain(self) -> str:
        texts = (self.title, self.context, self.source["data"])
        return "\n".join(text for text in texts if text)


class ImageSource(Body):
    """The place of an image: in the request, or at a URL."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _has_its_field(self) -> ImageSource:
        name = "data" if self.type == "base64" else "url"
        if getattr(self, name) is None:
            raise ValueError(f"a source of type {self.type!r} needs {name}")
        return self


class ImageBlock(_MarkedBlock):
    type: Literal["image"]
    source: ImageSource

    @property
    def url(self) -> str:
        """The image as a URL."""
        source = self.source
        if source.url is not None and source.type == "url":
            return source.url
        return f"data:{source.media_type or 'image/png'};base64,{source.data}"


class ToolReferenceBlock(_MarkedBlock):
    """Says that a tool in the request's list can be called from now on."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def plain(self) -> str:
        return f"The tool {self.tool_name} can be called now."


class ThinkingBlock(_MarkedBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Proves to the block's server that it is unchanged; any value is accepted."""


class RedactedBlock(_MarkedBlock):
    """Encrypted thinking, which only the server that made it can read; left out."""

    type: Literal["redacted_thinking"]
    data: Any = None

    def left_out(self) -> Iterator[str]:
        yield self.type


class CallBlock(_MarkedBlock):
    """A call of a tool, run by the client or by another server."""

    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    name: str
    id: str | None = None
    input: Any = None
    caller: Any = None
    server_name: str | None = None

    @property
    def arguments(self) -> Any:
        return {} if self.input is None else self.input

    def changed(self) -> Iterator[str]:
        if read_arguments(self.arguments)[1]:
            yield "input"


TextLike = Annotated[
    TextBlock | ImageBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ResultBlock(_MarkedBlock):
    """The result of a tool that the client ran."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[Many[TextLike], Field(max_length=MAX_PARTS)] | None = None
    is_error: Annotated[bool | None, Unread(False)] = None
    """The content says what went wrong."""


class ServerResultBlock(_MarkedBlock):
    """The result of a tool that another server ran; each kind has its own type."""

    type: AnyType
    tool_use_id: str
    content: Any = None
    is_error: Annotated[bool | None, Unread(False)] = None
    caller: Any = None


class OtherBlock(_MarkedBlock):
    type: str

    @field_validator("type")
    @classmethod
    def _is_not_served(cls, value: str) -> str:
        raise ValueError(f"{value[:64]!r} is not supported: only text and images are served")


def _other(kind: Any) -> type[Body]:
    is_result = isinstance(kind, str) and kind.endswith("_tool_result")
    return ServerResultBlock if is_result else OtherBlock


ContentBlock: Any = tagged(
    TextBlock,
    ImageBlock,
    SearchResultBlock,
    DocumentBlock,
    ThinkingBlock,
    RedactedBlock,
    CallBlock,
    ResultBlock,
    ServerResultBlock,
    OtherBlock,
    other=_other,
)


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
    tools: Many[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Former name of `output_config.format`."""
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[Any, Unread()] = None


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
