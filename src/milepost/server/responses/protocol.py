"""What the bodies of /v1/responses may hold. Items stand in `items`, tools in `tools`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from milepost.server.fields import MAX_INT, Body, Int64, Many, only, unread
from milepost.server.protocol import MAX_MESSAGES
from milepost.server.responses.items import Item
from milepost.server.responses.tools import ChosenTool, Tool


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: unread(str) = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: unread(str, "medium") = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: unread(str) = None
    """Reasoning is returned as it is."""
    generate_summary: unread(str) = None


class ResponseStreamOptions(Body):
    include_obfuscation: unread(bool, False) = None


LOGPROBS = "message.output_text.logprobs"
"""The only thing that `include` adds."""


class ResponsesRequest(Body):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[Many[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
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
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = None
    metadata: dict[str, Any] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    # Said to the service, not to the model.
    service_tier: unread(str, "auto", "default") = None
    safety_identifier: unread(str) = None
    kv_transfer_params: dict[str, Any] | None = None
    """What a router carries between an engine that prefills and one that decodes."""
    prompt_cache_key: unread(str) = None
    prompt_cache_retention: unread(str) = None
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

    def changed(self) -> Iterator[str]:
        for name in self.include or ():
            if name != LOGPROBS:
                yield f"include[{name}]"
