"""Items of the Responses API: what a conversation is made of.

Items of kinds that say nothing to a model here, such as a search that another server made, are
left out and named in the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator, model_validator

from milepost.server import arguments
from milepost.server.fields import MAX_PARTS, Body, Many, unread
from milepost.server.responses.tools import Tool


class ContentPart(Body):
    """A part of a message, of a tool's output or of a reasoning item."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: unread(Any) = None
    logprobs: Any = None
    """Clients send back what they were sent."""

    @model_validator(mode="after")
    def _has_text(self) -> ContentPart:
        if self.text is None and self.refusal is None:
            raise ValueError(f"a part of type {self.type!r} needs its text")
        return self


Parts = Annotated[Many[ContentPart], Field(max_length=MAX_PARTS)]


class _AnyItem(Body):
    id: str | None = None
    status: Any = None


class MessageItem(_AnyItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: unread(str) = None


class ReasoningItem(_AnyItem):
    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Parts | None = None
    """Stands in where there is no content."""
    encrypted_content: unread(str) = None


class CallItem(_AnyItem):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any
    caller: Any = None

    def changed(self) -> Iterator[str]:
        if arguments.read(self.arguments)[1]:
            yield "arguments"


class CustomCallItem(_AnyItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    caller: Any = None


class BuiltInCallItem(_AnyItem):
    """A call of a tool that the client ran and that only some models know."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"]
    call_id: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    arguments: Any = None
    execution: Any = None
    caller: Any = None
    environment: Any = None

    @property
    def name(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def given(self) -> dict[str, Any]:
        """What the tool was called with."""
        return self.action or self.operation or arguments.read(self.arguments)[0]


class OutputItem(_AnyItem):
    """What a tool returned."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str | None = None
    """A local shell's output has the call's as its `id`."""
    output: str | Parts | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class ShellOutputItem(_AnyItem):
    type: Literal["shell_call_output"]
    call_id: str
    output: Many[dict[str, Any]]
    max_output_length: Any = None
    caller: Any = None


class ToolSearchOutputItem(_AnyItem):
    type: Literal["tool_search_output"]
    call_id: str | None = None
    tools: Many[dict[str, Any]]
    execution: Any = None


class McpCallItem(_AnyItem):
    """A call that another server made, with what came of it."""

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
    tools: Many[Tool]


class OtherItem(_AnyItem):
    """Left out."""

    type: Annotated[str, Field(max_length=64)]

    @field_validator("type")
    @classmethod
    def _is_no_reference(cls, value: str) -> str:
        if value == "item_reference":
            raise ValueError(
                "items are not kept by their id: send the item itself, or previous_response_id"
            )
        return value

    @model_validator(mode="after")
    def _forget(self) -> OtherItem:
        self.__pydantic_extra__ = {}
        return self

    def left_out(self) -> Iterator[str]:
        yield self.type


_CLASSES: dict[str, type[_AnyItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "local_shell_call": BuiltInCallItem,
    "shell_call": BuiltInCallItem,
    "apply_patch_call": BuiltInCallItem,
    "tool_search_call": BuiltInCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
    "local_shell_call_output": OutputItem,
    "apply_patch_call_output": OutputItem,
    "shell_call_output": ShellOutputItem,
    "tool_search_output": ToolSearchOutputItem,
    "mcp_call": McpCallItem,
    "additional_tools": MoreToolsItem,
}


def _class_of(value: Any) -> str:
    if isinstance(value, Body):
        return type(value).__name__
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None:
        return MessageItem.__name__
    return (_CLASSES.get(kind, OtherItem) if isinstance(kind, str) else OtherItem).__name__


Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[CustomCallItem, Tag("CustomCallItem")]
    | Annotated[BuiltInCallItem, Tag("BuiltInCallItem")]
    | Annotated[OutputItem, Tag("OutputItem")]
    | Annotated[ShellOutputItem, Tag("ShellOutputItem")]
    | Annotated[ToolSearchOutputItem, Tag("ToolSearchOutputItem")]
    | Annotated[McpCallItem, Tag("McpCallItem")]
    | Annotated[MoreToolsItem, Tag("MoreToolsItem")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_class_of),
]
ITEM: TypeAdapter[Item] = TypeAdapter(Item)
