"""Applies a tokenizer's chat template to messages, and finds where the parts of a rendered
conversation end: the system prompt, the last message, and the places that the caller marks.

Templates say nothing about their parts, so these places are found by rendering shorter or differing
conversations and comparing the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from milepost.engine.text import roles
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


_PROBES = ("A", "B")
"""Two user messages that share no first character."""


def head_end(conversation: BoundTemplate, messages: list[dict[str, Any]], text: str) -> int:
    """Returns the end of the system prompt, including what the template adds to it, such as tools.
    The system prompt is rendered alone if the template allows it. Otherwise the end is found by
    comparing two conversations that differ from their first user message on."""
    head = messages[: roles.head_length(messages)]
    alone = conversation.text_if_taken(head) if head else None
    if alone and text.startswith(alone) and all(_content(m).strip() in alone for m in head):
        return len(alone)
    probes = [
        conversation.text_if_taken([*head, {"role": "user", "content": probe}]) for probe in _PROBES
    ]
    shared = common_length(*(probe or "" for probe in probes))
    return common_length(text, (probes[0] or "")[:shared])


def _content(message: dict[str, Any]) -> str:
    return message.get("content") or ""


def body_end(conversation: BoundTemplate, messages: list[dict[str, Any]], text: str) -> int:
    """Returns the end of the last message, where the generation prompt begins."""
    return common_length(text, conversation.text_if_taken(messages) or "")


_BREAKPOINT = "\ue0b1"
"""A character of the private use area: what follows a breakpoint never begins with it."""

MAX_BREAKPOINTS = 8


def breakpoints(
    conversation: BoundTemplate,
    messages: Sequence[ChatMessage],
    checked: list[dict[str, Any]],
    text: str,
    ending: Mapping[str, bool],
    joint: str,
) -> list[int]:
    """Returns the ends of the parts with a `cache_control`: the last MAX_BREAKPOINTS of them. Each
    is found by adding a character there: up to it, the texts agree."""
    ends = []
    for index, place in _last_places(messages):
        changed = as_text(_marked(messages[index], place), joint)
        others = [*checked[:index], changed, *checked[index + 1 :]]
        try:
            marked = conversation.text(others, ending)
        except REFUSALS:
            continue
        ends.append(common_length(text, marked))
    return ends


def _last_places(messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    """Returns (message, part) of the last MAX_BREAKPOINTS breakpoints, the last one first."""
    found: list[tuple[int, int]] = []
    for index in range(len(messages) - 1, -1, -1):
        parts = parts_of(messages[index])
        is_marked = bool(messages[index].get("cache_control"))
        for place in range(len(parts) - 1, -1, -1):
            if len(found) == MAX_BREAKPOINTS:
                return found
            is_last = place == len(parts) - 1
            if parts[place].get("cache_control") or (is_marked and is_last):
                found.append((index, place))
    return found


def _marked(message: ChatMessage, place: int) -> ChatMessage:
    """Returns the message with the breakpoint character added to one of its parts."""
    parts = parts_of(message)
    text = f"{parts[place].get('text', '')}{_BREAKPOINT}"
    if not isinstance(message.get("content"), list | tuple):
        return {**message, "content": text}
    added = {"type": "text", "text": text}
    return {**message, "content": [*parts[:place], added, *parts[place + 1 :]]}


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two texts or token sequences. Halves are compared
    at once, since a conversation can have millions of characters."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
