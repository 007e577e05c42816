"""Makes a chat template accept conversations that it would refuse, or show without some message.

Clients send system messages in any place: several at the beginning, or one in the middle. Most
templates allow one, at the beginning. The messages keep their order, so that a later turn still
begins with the earlier ones; only their roles may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ChatMessage = Mapping[str, Any]
RenderOrNone = Callable[[Sequence[ChatMessage]], str | None]
"""Renders a conversation; None if the template refuses it."""

SYSTEM = ("system", "developer")
_NOTHING: ChatMessage = {"role": "user", "content": ""}
_MARK = "\ue0b4"
"""A text that occurs in no template."""


def with_system_first(
    messages: Sequence[ChatMessage], shown: RenderOrNone, joint: str
) -> list[ChatMessage]:
    """Returns the messages with one system message at the beginning. Later ones stay if the
    template shows them; otherwise they become user messages. `joint` separates the parts of a
    message."""
    end = head_length(messages)
    head = list(messages[:end])
    if end > 1:
        head = [_joined(head, joint)]
    rest = list(messages[end:])
    if any(_role(message) in SYSTEM for message in rest) and not _shows_later_ones(shown):
        rest = [_as_user(message) if _role(message) in SYSTEM else message for message in rest]
    return [*head, *rest]


def equivalents(messages: Sequence[ChatMessage], joint: str) -> Iterator[list[ChatMessage]]:
    """Yields equivalent conversations to try in turn if a template refuses this one: with a user
    message, without a system message, starting with the user, and with alternating roles."""
    conversation = list(messages)
    if all(_role(message) != "user" for message in conversation):
        conversation = _with_user(conversation)
        yield conversation
    if _role(conversation[0]) in SYSTEM:
        has_question = len(conversation) > 1 and _role(conversation[1]) == "user"
        said = conversation[: 1 + has_question]
        conversation = [_as_user(_joined(said, joint)), *conversation[len(said) :]]
        yield conversation
    if _role(conversation[0]) == "assistant":
        conversation = [_NOTHING, *conversation]
        yield conversation
    taken = _in_turns(conversation, joint)
    if len(taken) < len(conversation):
        yield taken


def _role(message: ChatMessage) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def head_length(messages: Sequence[ChatMessage]) -> int:
    """Returns the number of system messages at the beginning."""
    for number, message in enumerate(messages):
        if _role(message) not in SYSTEM:
            return number
    return len(messages)


def _as_user(message: ChatMessage) -> ChatMessage:
    return {**message, "role": "user"}


def _shows_later_ones(shown: RenderOrNone) -> bool:
    users = [{"role": "user", "content": text} for text in "ab"]
    text = shown([users[0], {"role": "system", "content": _MARK}, users[1]])
    return text is not None and _MARK in text


def _with_user(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Turns a system message at the head into the user's. Without one, adds an empty user
    message."""
    if messages and _role(messages[0]) in SYSTEM:
        return [_as_user(messages[0]), *messages[1:]]
    return [_NOTHING, *messages]


def _in_turns(messages: list[ChatMessage], joint: str) -> list[ChatMessage]:
    """Returns the messages with neighbours of the user joined, and those of the assistant without
    calls."""
    turns: list[ChatMessage] = []
    for message in messages:
        is_same = bool(turns) and _role(turns[-1]) == _role(message)
        is_plain = _role(message) in ("user", "assistant") and not message.get("tool_calls")
        if is_same and is_plain and not turns[-1].get("tool_calls"):
            turns[-1] = _joined([turns[-1], message], joint)
        else:
            turns.append(message)
    return turns


def _joined(messages: Sequence[ChatMessage], joint: str) -> ChatMessage:
    """Joins messages into one, with an empty line between their parts."""
    gap = "\n\n".removeprefix(joint)
    parts: list[Any] = []
    for message in messages:
        added = _parts(message)
        if added and parts:
            first = added[0] if isinstance(added[0], Mapping) else {}
            added = [{**first, "text": f"{gap}{first.get('text', '')}"}, *added[1:]]
        parts += added
    first = {key: value for key, value in messages[0].items() if key != "cache_control"}
    return {**first, "content": parts}


def _parts(message: ChatMessage) -> list[Any]:
    """Returns a message's parts; the last one takes over its `cache_control`."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = list(content)
    else:
        parts = [{"type": "text", "text": content}] if content else []
    if parts and message.get("cache_control") and isinstance(parts[-1], Mapping):
        parts[-1] = {**parts[-1], "cache_control": message["cache_control"]}
    return parts
