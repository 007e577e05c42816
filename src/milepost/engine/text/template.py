"""Applies a tokenizer's chat template to messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from milepost.engine.text.roles import ChatMessage
from milepost.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
"""Exceptions that count as a refusal of the conversation, since a template is a program."""


@dataclass(frozen=True, slots=True)
class BoundTemplate:
    """A chat template with everything that determines its text except the messages."""

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Any] | None
    template_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        named = self.template_kwargs.get("chat_template")
        if not named and not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "the tokenizer has no chat template: use generate() with a plain prompt, or name "
                "one with chat_template_kwargs={'chat_template': ...}"
            )

    def text(self, messages: Sequence[ChatMessage], ending: Mapping[str, bool]) -> str:
        apply: Any = self.tokenizer.apply_chat_template
        variables = self.template_kwargs
        text: str = apply(list(messages), tools=self.tools, tokenize=False, **ending, **variables)
        return text

    def text_if_taken(self, messages: Sequence[ChatMessage]) -> str | None:
        """Returns the text without a generation prompt, or None if the template refuses these
        messages."""
        try:
            return self.text(messages, {"add_generation_prompt": False})
        except REFUSALS:
            return None


_PARTS = ("\ue0b2", "\ue0b3")
"""Two texts that occur in no template."""


def joint_of(conversation: BoundTemplate, messages: Sequence[ChatMessage]) -> str:
    """Returns the text that separates the text parts of a message: the template's own if it reads
    parts, otherwise a line break."""
    if all(len(parts_of(message)) < 2 for message in messages if isinstance(message, Mapping)):
        return "\n"
    parts = [{"type": "text", "text": text} for text in _PARTS]
    shown = conversation.text_if_taken([{"role": "user", "content": parts}]) or ""
    between = shown.partition(_PARTS[0])[2].partition(_PARTS[1])
    return between[0] if between[1] and not between[0].strip() else "\n"


def as_text(message: ChatMessage, joint: str) -> dict[str, Any]:
    """Returns a copy of a message without breakpoints and with its parts joined into one text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = joint.join(_part_text(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"content={content!r}: use a string or a list of text parts")
    fields = {key: value for key, value in message.items() if key != "cache_control"}
    return {**fields, "content": content} if "content" in message else fields


def with_image_texts(messages: Sequence[ChatMessage], texts: Sequence[str]) -> list[ChatMessage]:
    """Returns messages with a text for each image part. Templates write the same for an image, and
    add nothing between it and the texts beside it.
    """
    left = iter(texts)
    return [
        {**message, "content": [_with_text(part, left) for part in parts_of(message)]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _with_text(part: Any, left: Iterator[str]) -> Any:
    is_image = isinstance(part, Mapping) and part.get("type") == "image"
    return {**part, "type": "text", "text": next(left)} if is_image else part


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text"):
        return str(part.get("text", ""))
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequestError(f"content part {kind!r}: only text parts are supported here")


def parts_of(message: ChatMessage) -> Sequence[Any]:
    """Returns the parts of a message; a plain text is one part."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else [{"text": content or ""}]
