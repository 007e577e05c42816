"""Bodies of /v1/responses, and the items of a conversation. Tools are in `tools`.

Items that mean nothing to a model here, such as a search that another server made, are left out and
named in the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from milepost.server.fields import (
    MAX_PARTS,
    Alternatives,
    AnyType,
    Body,
    Detail,
    LeftOutBody,
    Many,
    Only,
    Positive,
    ToolList,
    Unread,
    tagged,
)
from milepost.server.parts import AnswerFields, MarkedPart
from milepost.server.protocol import MAX_MESSAGES
from milepost.server.responses.tools import ChosenTool, ResponseTool
from milepost.server.tools import read_arguments


class ContentPart(MarkedPart):
    """A part of a message, of a tool's output or of a reasoning item."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[Any, Unread()] = None
    logprobs: Any = None
    """Clients send these back as they received them."""

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.text is None and self.refusal is None:
            raise ValueError(f"a part of type {self.type!r} needs its text")
        return self


class InputImage(MarkedPart):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Annotated[Any, Only(hint="use image_url with a data: URL")] = None
    detail: Detail | None = None

    @model_validator(mode="after")
    def _has_url(self) -> InputImage:
        if self.image_url is None:
            raise ValueError("an input_image needs its image_url")
        return self


class OtherContent(Body):
    """A part of any other type."""

    type: AnyType

    @field_validator("type")
    @classmethod
    def _is_not_served(cls, value: str) -> str:
        raise ValueError(f"{value!r} is not supported: only text and input_image are served")


AnyContent: Any = tagged(ContentPart, InputImage, OtherContent, other=lambda _: OtherContent)
Parts = Annotated[Many[AnyContent], Field(max_length=MAX_PARTS)]
TextParts = Annotated[Many[ContentPart], Field(max_length=MAX_PARTS)]


class _AnyItem(Body):
    id: str | None = None
    status: Any = None
    caller: Any = None


class MessageItem(_AnyItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: Annotated[str | None, Unread()] = None


class ReasoningItem(_AnyItem):
    type: Literal["reasoning"]
    content: TextParts | None = None
    summary: TextParts | None = None
    """The text that is used if there is no content."""
    encrypted_content: Annotated[str | None, Unread()] = None


class CallItem(_AnyItem):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any

    def changed(self) -> Iterator[str]:
        if read_arguments(self.arguments)[1]:
            yield "arguments"


class CustomCallItem(_AnyItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class BuiltInCallItem(_AnyItem):
    """A call that the client ran, of a tool known only to some models."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"]
    call_id: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    arguments: Any = None
    execution: Any = None
    environment: Any = None

    @property
    def name(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def given(self) -> dict[str, Any]:
        """The tool's arguments."""
        return self.action or self.operation or read_arguments(self.arguments)[0]


class OutputItem(_AnyItem):
    """The output of a tool."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str | None = None
    """A local shell's output has the id of its call in `id` instead."""
    output: str | Parts | None = None
    name: str | None = None
    namespace: str | None = None


class ShellOutputItem(_AnyItem):
    type: Literal["shell_call_output"]
    call_id: str
    output: Many[dict[str, Any]]
    max_output_length: Any = None


class ToolSearchOutputItem(_AnyItem):
    type: Literal["tool_search_output"]
    call_id: str | None = None
    tools: Many[dict[str, Any]]
    execution: Any = None


class McpCallItem(_AnyItem):
    """A call that another server made, with its result."""

    type: Literal["mcp_call"]
    name: str
    arguments: Any = None
    output: str | None = None
    error: Any = None
    server_label: Any = None
    approval_request_id: Any = None


class MoreToolsItem(_AnyItem):
    type: Literal["additional_tools"]
    role: Any = None
    tools: ToolList[ResponseTool]


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=256)]


class OtherItem(_AnyItem, LeftOutBody):
    """An item that is left out."""

    type: AnyType

    @field_validator("type")
    @classmethod
    def _asks_for_an_answer(cls, value: str) -> str:
        if value == "compaction_trigger":  # wants a summary that only its maker can read
            raise ValueError(f"{value!r} is not supported: ask for a summary in a message")
        return value

    def left_out(self) -> Iterator[str]:
        yield self.type


ResponseItem: Any = tagged(
    MessageItem,
    ReasoningItem,
    CallItem,
    CustomCallItem,
    BuiltInCallItem,
    OutputItem,
    ShellOutputItem,
    ToolSearchOutputItem,
    McpCallItem,
    MoreToolsItem,
    ItemReference,
    OtherItem,
    other=lambda kind: MessageItem if kind is None else OtherItem,
)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: Annotated[str | None, Unread()] = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, Unread("medium")] = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Annotated[str | None, Unread()] = None
    """Reasoning is returned unchanged."""
    generate_summary: Annotated[str | None, Unread()] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[bool | None, Unread(False)] = None


LOGPROBS = "message.output_text.logprobs"
"""The only value of `include` that has an effect."""


class ResponsesRequest(AnswerFields):
    """POST /v1/responses"""

    input: str | Annotated[Many[ResponseItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    """True (the default) keeps the response, for previous_response_id and GET."""
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Alternatives | None = None
    tools: ToolList[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, Unread("disabled")] = None
    """`auto` drops nothing either: a prompt that is too long is refused."""
    background: Annotated[Any, Only(False)] = None
    conversation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    max_tool_calls: Any = None
    """Limits calls of tools that a server runs; none are run here."""

    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def changed(self) -> Iterator[str]:
        for name in self.include or ():
            if name != LOGPROBS:
                yield f"include[{name}]"
