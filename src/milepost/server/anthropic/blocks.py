"""Blocks of content: of messages, system prompts and results of tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from milepost.server.fields import MAX_PARTS, AnyType, Body, LeftOutBody, Many, Unread, tagged
from milepost.server.parts import CacheControl
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


class ToolChangeBlock(_MarkedBlock):
    """Says that a tool in the request's list can be called, or not, from now on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: dict[str, Any]

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChangeBlock:
        if not isinstance(self.tool.get("name"), str):
            raise ValueError("only changes with the name of a tool are served: define it in tools")
        return self

    @property
    def plain(self) -> str:
        can = "can" if self.type == "tool_addition" else "can no longer"
        return f"The tool {self.tool['name']} {can} be called now."


class ThinkingBlock(_MarkedBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Proves to the block's server that it is unchanged; any value is accepted."""


class LeftOutBlock(_MarkedBlock, LeftOutBody):
    """A note that only the server which wrote it can read: encrypted thinking, where another model
    took over, which tools a server had."""

    type: Literal["redacted_thinking", "fallback", "mcp_tool_listing"]

    def left_out(self) -> Iterator[str]:
        yield self.type


class CompactionBlock(_MarkedBlock, LeftOutBody):
    """A summary that stands for all of the conversation before it."""

    type: Literal["compaction"]
    content: str | None = None
    """None after an attempt that failed; the conversation goes on as it is."""


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
    ToolChangeBlock,
    ThinkingBlock,
    LeftOutBlock,
    CompactionBlock,
    CallBlock,
    ResultBlock,
    ServerResultBlock,
    OtherBlock,
    other=_other,
)
