"""What the bodies of requests are made of: messages, tools, formats; and kinds of fields.

A field that we do not support takes only values that do not change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from milepost.server.bodies import STOP_AT_FIRST

MAX_INT = 2**63 - 1
MAX_PARTS = 8192
T = TypeVar("T")
Many = Annotated[list[T], STOP_AT_FIRST]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Int64 = Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
MAX_STOP_LEN = 1024
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


def _only_text(value: Any) -> Any:
    if isinstance(value, str) and value not in ("text", "refusal"):
        raise ValueError(f"{value[:32]!r} is not supported: only text is served")
    return value


class TextPart(Body):
    """Text, or what an assistant said in place of an answer, which counts as text."""

    type: Annotated[Literal["text", "refusal"], BeforeValidator(_only_text)]
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
    arguments: str | dict[str, Any] | None = "{}"
    """JSON text, or its object."""


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


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


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
    """The form of an answer, as `response_format` names it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class StructuredOutputsField(Body):
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
