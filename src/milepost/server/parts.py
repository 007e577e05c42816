"""Parts of bodies: messages and formats. Tools are in `tools`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from milepost.images.settings import MAX_FRAMES
from milepost.server.fields import (
    MAX_INT,
    MAX_PARTS,
    Body,
    Detail,
    Int64,
    Many,
    Only,
    Unread,
    WholeNumber,
    tagged,
    with_type,
)
from milepost.server.tools import ToolCall


class StreamOptions(Body):
    include_usage: bool | None = None
    """Ends the stream with a chunk that has `usage`."""
    continuous_usage_stats: bool | None = None
    """Adds the usage so far to every chunk, if include_usage is set."""
    include_obfuscation: Annotated[bool | None, Unread(False)] = None


class CacheControl(Body):
    """A breakpoint: the state at the end of this part is worth keeping."""

    type: Literal["ephemeral"]
    ttl: Annotated[str | None, Unread()] = None


class CacheBreakpoint(Body):
    """A breakpoint in OpenAI's form."""

    mode: Literal["explicit"]
    ttl: Annotated[str | None, Unread()] = None


class MarkedPart(Body):
    """A part whose end may be a breakpoint, in Anthropic's form or in OpenAI's."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def is_marked(self) -> bool:
        return (self.cache_control or self.prompt_cache_breakpoint) is not None


class ImageUrl(Body):
    """An image by its URL, most often a data: URL."""

    url: str
    detail: Detail | None = None


class ImagePart(MarkedPart):
    """An image, as Chat Completions or the Responses API have it."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str
    detail: Detail | None = None
    uuid: Annotated[str | None, Unread()] = None

    @property
    def plain(self) -> dict[str, Any]:
        """The part as `engine.media` reads it."""
        image, detail = self.image_url, self.detail
        if isinstance(image, str):
            return {"type": "image_url", "image_url": image, "detail": detail}
        return {"type": "image_url", "image_url": image.url, "detail": image.detail or detail}


class VideoUrl(Body):
    """A video by its URL, most often a data: URL of an animation."""

    url: str


class VideoPart(MarkedPart):
    """A video, as vLLM has it."""

    type: Literal["video_url"]
    video_url: VideoUrl | str
    uuid: Annotated[str | None, Unread()] = None

    @property
    def plain(self) -> dict[str, Any]:
        """The part as `engine.media` reads it."""
        url = self.video_url
        return {"type": "video_url", "video_url": url.url if isinstance(url, VideoUrl) else url}


class VideoFrames(Body):
    """Frames by their URLs, and their times in seconds, or how many a second they are."""

    frames: Annotated[Many[str], Field(max_length=MAX_FRAMES)]
    times: Annotated[Many[float], Field(max_length=MAX_FRAMES)] | None = None
    fps: float | None = None


class FramesPart(MarkedPart):
    """A video as a list of its frames."""

    type: Literal["video"]
    video: VideoFrames
    uuid: Annotated[str | None, Unread()] = None

    @property
    def plain(self) -> dict[str, Any]:
        """The part as `engine.media` reads it."""
        video = self.video
        return {
            "type": "video",
            "video": {"frames": video.frames, "times": video.times, "fps": video.fps},
        }


class OtherPart(Body):
    """A part of any other type."""

    type: str

    @field_validator("type")
    @classmethod
    def _is_not_served(cls, value: str) -> str:
        raise ValueError(
            f"{value[:32]!r} is not supported: only text, images and videos are served"
        )


class TextPart(MarkedPart):
    """Text, or a refusal of the assistant's, which counts as text."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """The part as chat templates read it."""
        return {"type": "text", "text": self.refusal if self.type == "refusal" else self.text}

    @model_validator(mode="after")
    def _has_its_text(self) -> TextPart:
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise ValueError(f"a part of type {self.type!r} needs a {name}")
        return self


class ThinkingPart(Body):
    """Reasoning of the assistant's, as Mistral's clients send it back."""

    type: Literal["thinking"]
    thinking: str | Annotated[Many[TextPart], Field(max_length=MAX_PARTS)]

    @property
    def said(self) -> str:
        if isinstance(self.thinking, str):
            return self.thinking
        return "".join(part.plain["text"] for part in self.thinking)


AnyPart: Any = tagged(
    TextPart, ThinkingPart, ImagePart, VideoPart, FramesPart, OtherPart, other=lambda _: OtherPart
)


def _texts_as_parts(content: Any) -> Any:
    """Returns a content in which no text stands for a part with it, as vLLM allows."""
    if type(content) is not list or str not in map(type, content):
        return content
    return [{"type": "text", "text": part} if type(part) is str else part for part in content]


class Message(Body):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[Many[AnyPart], Field(max_length=MAX_PARTS)] | None,
        BeforeValidator(_texts_as_parts),
    ] = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: CacheControl | None = None
    refusal: str | None = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(hint="use tool_calls")] = None
    annotations: Annotated[Any, Unread()] = None
    """Clients send these back as they received them; the model does not see them."""

    @model_validator(mode="after")
    def _has_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of role {self.role!r} needs a content")
        return self


class JsonSchema(Body):
    name: str | None = None
    description: Annotated[str | None, Unread()] = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer, as in `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Schema of a `json_object`, as llama.cpp and others have it."""

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("use schema with type 'json_object', and json_schema otherwise")
        return with_type("json_schema", self)


MAX_CHOICES = 2**16


class StructuredOutputsField(Body):
    """vLLM's field: exactly one form of the answer."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[Many[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark."""
    json_object: bool | None = None
    structural_tag: Annotated[Any, Only()] = None
    disable_any_whitespace: bool | None = None
    """Allows no white space between values; needs a JSON schema."""
    disable_additional_properties: Annotated[Any, Only(False)] = None
    whitespace_pattern: Annotated[Any, Only()] = None


class AnswerFields(Body):
    """Fields that completions, chat and the Responses API share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: Annotated[WholeNumber, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    """Requests with lower values run first."""
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Written to the access log."""
    kv_transfer_params: dict[str, Any] | None = None
    """Passed by a router from the engine that prefills to the one for decoding."""

    # Meant for the service rather than the model.
    service_tier: Annotated[str | None, Unread("auto", "default")] = None
    prompt_cache_key: Annotated[str | None, Unread()] = None
    prompt_cache_retention: Annotated[str | None, Unread()] = None
    safety_identifier: Annotated[str | None, Unread()] = None
