"""Finds where the parts of a rendered conversation end: the system prompt, the last message, and
the places that the caller marks.

Templates say nothing about their parts, so these places are found by rendering shorter or differing
conversations and comparing the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from milepost.engine.text import roles
from milepost.engine.text.roles import ChatMessage
from milepost.engine.text.template import REFUSALS, BoundTemplate, as_text, parts_of

_PROBES = ("A", "B")
"""Two user messages that share no first character."""


def head_end(conversation: BoundTemplate, messages: list[dict[str, Any]], text: str) -> int:
    """Returns the end of the system prompt, including what the template adds to it, such as tools.
    The system prompt is rendered alone if the template allows it. Otherwise the end is found by
    comparing two conversations that differ from their first user message on."""
    head = messages[: _head_length(messages)]
    alone = conversation.text_if_taken(head) if head else None
    if alone and text.startswith(alone) and all(_content(m).strip() in alone for m in head):
        return len(alone)
    probes = [
        conversation.text_if_taken([*head, {"role": "user", "content": probe}]) for probe in _PROBES
    ]
    shared = common_length(*(probe or "" for probe in probes))
    return common_length(text, (probes[0] or "")[:shared])


def _head_length(messages: list[dict[str, Any]]) -> int:
    is_system = [message["role"] in roles.SYSTEM for message in messages]
    return is_system.index(False) if False in is_system else len(is_system)


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
