"""Blocks of /v1/messages: what messages, system prompts and tools' results are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from milepost.server import arguments
from milepost.server.fields import MAX_PARTS, Body, Many, unread
from milepost.server.parts import CacheControl


class _MarkedBlock(Body):
    cache_control: CacheControl | None = None
    citations: unread(Any) = None


class TextBlock(_MarkedBlock):
    type: Literal["text"]
    text: str

    @property
    def plain(self) -> str:
        """The block as text."""
        return self.text


class SearchResultBlock(_MarkedBlock):
    """What a client's own search found."""

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


class ToolReferenceBlock(_MarkedBlock):
    """Says that a tool, which stands in the request's list, can be called from now on."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def plain(self) -> str:
        return f"The tool {self.tool_name} can be called now."


class ThinkingBlock(_MarkedBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Proves to whoever made the block that it was not changed; anything passes."""


class RedactedBlock(_MarkedBlock):
    """Thinking that only the server that made it can read: left out."""

    type: Literal["redacted_thinking"]
    data: Any = None

    def left_out(self) -> Iterator[str]:
        yield self.type


class CallBlock(_MarkedBlock):
    """A call of a tool that the client runs, or that another server has run."""

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
        if arguments.read(self.arguments)[1]:
            yield "input"


TextLike = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")
]


class ResultBlock(_MarkedBlock):
    """What a tool of the client's returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[Many[TextLike], Field(max_length=MAX_PARTS)] | None = None
    is_error: unread(bool, False) = None
    """What went wrong, the content says."""


class ServerResultBlock(_MarkedBlock):
    """What a tool returned that another server has run; each kind has a type of its own."""

    type: Annotated[str, Field(max_length=64)]
    tool_use_id: str
    content: Any = None
    is_error: unread(bool, False) = None
    caller: Any = None


class OtherBlock(_MarkedBlock):
    type: str

    @field_validator("type")
    @classmethod
    def _is_not_served(cls, value: str) -> str:
        raise ValueError(f"{value[:64]!r} is not supported: only text is served")


_CLASSES: dict[str, type[Body]] = {
    "text": TextBlock,
    "search_result": SearchResultBlock,
    "document": DocumentBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": CallBlock,
    "server_tool_use": CallBlock,
    "mcp_tool_use": CallBlock,
    "tool_result": ResultBlock,
}


def _class_of(value: Any) -> str:
    if isinstance(value, Body):
        return type(value).__name__
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return OtherBlock.__name__
    is_result = kind.endswith("_tool_result")
    return _CLASSES.get(kind, ServerResultBlock if is_result else OtherBlock).__name__


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[SearchResultBlock, Tag("SearchResultBlock")]
    | Annotated[DocumentBlock, Tag("DocumentBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedBlock, Tag("RedactedBlock")]
    | Annotated[CallBlock, Tag("CallBlock")]
    | Annotated[ResultBlock, Tag("ResultBlock")]
    | Annotated[ServerResultBlock, Tag("ServerResultBlock")]
    | Annotated[OtherBlock, Tag("OtherBlock")],
    Discriminator(_class_of),
]
