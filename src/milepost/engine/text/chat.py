"""Renders a conversation with the tokenizer's chat template, and finds where a checkpoint pays.

The marks are where other prompts are likely to leave this one: the end of the system prompt and the
tools, and the end of the last message. Templates say nothing about their parts, so these places are
found by rendering shorter or differing conversations and comparing the text. A mark is always a
position of this very prompt, whatever a template does to earlier messages.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from milepost.engine.text import roles
from milepost.engine.text.roles import ChatMessage
from milepost.engine.text.special import CUT, cut
from milepost.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
"""What a template that does not take a conversation raises: it is a program."""
_MAX_REFUSAL = 1000
"""Characters that are shown of what it says; it may quote all that it was given."""

_PROBES = ("A", "B")
"""Two user messages that share no first character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]
    marks: tuple[int, ...]
    """Token positions inside the prompt, ascending."""
    breakpoints: tuple[int, ...] = ()
    """Those of the marks that a `cache_control` made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A conversation as text, before it is tokenized."""

    pieces: list[str]
    """Each tokenized by itself, so that no special token stands across two of them."""
    ends: list[int]
    """Where parts of the text end; a character between two pieces counts. The first two are those
    of the system prompt and of the last message, the others the breakpoints."""

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    def places(self) -> list[list[int]]:
        """For each piece the ends, as characters of it."""
        found, start = [], 0
        for piece in self.pieces:
            found.append([min(max(end - start, 0), len(piece)) for end in self.ends])
            start += len(piece) + 1
        return found

    def prompt(self, encoded: Sequence[tuple[list[int], list[int]]]) -> ChatPrompt:
        """Of the token ids of each piece, with the number of its tokens before each end."""
        token_ids: list[int] = []
        positions = [0] * len(self.ends)
        for (ids, counts), places in zip(encoded, self.places(), strict=True):
            for number, count in enumerate(counts):
                if places[number] > 0:
                    positions[number] = len(token_ids) + count
            token_ids += ids
        inside = range(1, len(token_ids))
        return ChatPrompt(
            text="".join(self.pieces),
            token_ids=token_ids,
            marks=tuple(sorted({position for position in positions if position in inside})),
            breakpoints=tuple(position for position in positions[2:] if position in inside),
        )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], **options: Any
) -> ChatPrompt:
    """Token ids and marks of a conversation: `compose`, which has the options, and `tokenized`."""
    return tokenized(tokenizer, compose(tokenizer, messages, **options))


def tokenized(tokenizer: PreTrainedTokenizerBase, composed: Composed) -> ChatPrompt:
    """With the token ids of its text. A token that reaches over an end counts as after it."""
    pairs = zip(composed.pieces, composed.places(), strict=True)
    return composed.prompt([_tokenize(tokenizer, piece, ends) for piece, ends in pairs])


def compose(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special: re.Pattern[str] | None = None,
    check: Callable[[str], None] | None = None,
) -> Composed:
    """The text of a conversation. With `continue_final_message` it ends inside the last message, so
    that the answer goes on with it, and `add_generation_prompt` does nothing.

    A message, or a text part of one, with a `cache_control` gets a mark at its end; so does what
    the template itself marks: the end of the system prompt and tools, and of the last message.
    What matches `special` in messages, tools or arguments is read as text. `check` may refuse the
    text before the marks in it are looked for.

    Raises InvalidRequestError if there is no template, if it refuses the conversation, or if a
    message has something other than text.
    """
    if continue_final_message:
        ending = {"add_generation_prompt": False, "continue_final_message": True}
    else:
        ending = {"add_generation_prompt": add_generation_prompt}
    template_kwargs = dict(chat_template_kwargs or {})
    if special is not None:
        messages, tools = cut(messages, special), cut(tools, special)
        template_kwargs = cut(template_kwargs, special)
    conversation = _Conversation(tokenizer, tools, template_kwargs)
    joint = _joint(conversation, messages)
    messages, checked, text = _taken(conversation, messages, ending, joint)
    if check is not None:
        check(text)
    ends = [
        _head_end(conversation, checked, text),
        _body_end(conversation, checked, text),
        *_breakpoints(conversation, messages, checked, text, ending, joint),
    ]
    return Composed(pieces=text.split(CUT) if special is not None else [text], ends=ends)


def _taken(
    conversation: _Conversation,
    messages: Sequence[ChatMessage],
    ending: Mapping[str, bool],
    joint: str,
) -> tuple[Sequence[ChatMessage], list[dict[str, Any]], str]:
    """The conversation as the template takes it, the same with texts for contents, and all of it
    as text. Raises InvalidRequestError if it is refused however it is put."""
    for message in messages:
        _check_role(message)
    if not messages:
        raise InvalidRequestError("messages=[]: use one message or more")
    messages = roles.placed(messages, conversation.text_if_taken, joint)
    refusal: Exception | None = None
    for put in itertools.chain([messages], roles.mends(messages, joint)):
        checked = [_checked(message, joint) for message in put]
        try:
            return put, checked, conversation.text(checked, ending)
        except _REFUSALS as error:
            refusal = refusal or error
    why = str(refusal)[:_MAX_REFUSAL]
    raise InvalidRequestError(f"the chat template refuses the messages: {why}") from refusal


def _check_role(message: ChatMessage) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"message {message!r}: use a dict with a role and a content")


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Everything that decides the text, besides the messages."""

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
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=self.tools,
            tokenize=False,
            **ending,
            **self.template_kwargs,
        )

    def text_if_taken(self, messages: Sequence[ChatMessage]) -> str | None:
        """Without a generation prompt; None if the template refuses these messages."""
        try:
            return self.text(messages, {"add_generation_prompt": False})
        except _REFUSALS:
            return None


_PARTS = ("\ue0b2", "\ue0b3")
"""Two texts that no template has."""


def _joint(conversation: _Conversation, messages: Sequence[ChatMessage]) -> str:
    """What stands between the text parts of a message: what the template puts there, where it reads
    parts at all, and else a line break."""
    if all(len(_parts(message)) < 2 for message in messages if isinstance(message, Mapping)):
        return "\n"
    parts = [{"type": "text", "text": text} for text in _PARTS]
    shown = conversation.text_if_taken([{"role": "user", "content": parts}]) or ""
    between = shown.partition(_PARTS[0])[2].partition(_PARTS[1])
    return between[0] if between[1] and not between[0].strip() else "\n"


def _checked(message: ChatMessage, joint: str) -> dict[str, Any]:
    """A copy without breakpoints, whose content is text: a list of parts becomes one string."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = joint.join(_part_text(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"content={content!r}: use a string or a list of text parts")
    own = {key: value for key, value in message.items() if key != "cache_control"}
    return {**own, "content": content} if "content" in message else own


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text"):
        return str(part.get("text", ""))
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequestError(f"content part {kind!r}: only text parts are supported")


# --- where the parts of the text end --------------------------------------------------------------


def _head_end(conversation: _Conversation, messages: list[dict[str, Any]], text: str) -> int:
    """Where the system prompt (and what the template puts beside it, such as tools) ends.

    Rendered on its own where the template allows that and keeps it whole; otherwise what two
    conversations share that differ from their first user message on.
    """
    head = messages[: _head_length(messages)]
    alone = conversation.text_if_taken(head) if head else None
    if alone and text.startswith(alone) and all(_content(m).strip() in alone for m in head):
        return len(alone)
    probes = [
        conversation.text_if_taken([*head, {"role": "user", "content": probe}]) for probe in _PROBES
    ]
    shared = _common_length(*(probe or "" for probe in probes))
    return _common_length(text, (probes[0] or "")[:shared])


def _head_length(messages: list[dict[str, Any]]) -> int:
    is_system = [message["role"] in roles.SYSTEM for message in messages]
    return is_system.index(False) if False in is_system else len(is_system)


def _content(message: dict[str, Any]) -> str:
    return message.get("content") or ""


def _body_end(conversation: _Conversation, messages: list[dict[str, Any]], text: str) -> int:
    """Where the last message ends and the generation prompt begins."""
    return _common_length(text, conversation.text_if_taken(messages) or "")


_BREAKPOINT = "\ue0b1"
"""A character of the private use area: what follows a breakpoint never begins with it."""

MAX_BREAKPOINTS = 8


def _breakpoints(
    conversation: _Conversation,
    messages: Sequence[ChatMessage],
    checked: list[dict[str, Any]],
    text: str,
    ending: Mapping[str, bool],
    joint: str,
) -> list[int]:
    """Where the parts with a `cache_control` end: the last MAX_BREAKPOINTS of them.

    Each is found by adding a character there: up to it, the texts agree.
    """
    ends = []
    for index, place in _last_places(messages):
        changed = _checked(_marked(messages[index], place), joint)
        others = [*checked[:index], changed, *checked[index + 1 :]]
        try:
            marked = conversation.text(others, ending)
        except _REFUSALS:
            continue
        ends.append(_common_length(text, marked))
    return ends


def _last_places(messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    """(Message, part) of the last MAX_BREAKPOINTS breakpoints, the last one first."""
    found: list[tuple[int, int]] = []
    for index in range(len(messages) - 1, -1, -1):
        parts = _parts(messages[index])
        is_marked = bool(messages[index].get("cache_control"))
        for place in range(len(parts) - 1, -1, -1):
            if len(found) == MAX_BREAKPOINTS:
                return found
            is_last = place == len(parts) - 1
            if parts[place].get("cache_control") or (is_marked and is_last):
                found.append((index, place))
    return found


def _parts(message: ChatMessage) -> Sequence[Any]:
    """A content that is one text is one part."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else [{"text": content or ""}]


def _marked(message: ChatMessage, place: int) -> ChatMessage:
    """The message with the character added to one of its parts."""
    parts = _parts(message)
    text = f"{parts[place].get('text', '')}{_BREAKPOINT}"
    if not isinstance(message.get("content"), list | tuple):
        return {**message, "content": text}
    added = {"type": "text", "text": text}
    return {**message, "content": [*parts[:place], added, *parts[place + 1 :]]}


def _common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many characters, or tokens, two sequences share from the start.

    Halves are compared whole: a conversation can have millions of characters.
    """
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- characters to tokens -------------------------------------------------------------------------


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        prefixes = [tokenizer.encode(text[:end], add_special_tokens=False) for end in ends]
        return token_ids, [_common_length(token_ids, prefix) for prefix in prefixes]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], tokens_before(encoding["offset_mapping"], ends)


def tokens_before(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """For each end in a text the number of tokens that lie before it."""
    token_ends = [end for _, end in offsets]
    return [bisect_left(token_ends, end + 1) for end in ends]
