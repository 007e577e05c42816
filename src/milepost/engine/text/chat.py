"""Renders a conversation with the tokenizer's chat template, and finds where a checkpoint is worth
keeping.

The marks are where other prompts are likely to diverge from this one: the end of the system prompt
and the tools, and the end of the last message (`template`). A mark is always a position of this
very prompt, whatever a template does to earlier messages.

Text that somebody else wrote is never read as special tokens. A template writes them (<|im_start|>,
<|im_end|>) around messages, and a tokenizer recognises them anywhere, so a message that contains
them could end itself and go on in another role. So they are cut in two before the template sees
them. The cut is a character that occurs in no text, and the rendered text is tokenized in pieces
between the cuts.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.engine.prompts import Prompt
from milepost.engine.text import roles
from milepost.engine.text.roles import ChatMessage
from milepost.engine.text.template import (
    REFUSALS,
    BoundTemplate,
    as_text,
    body_end,
    breakpoints,
    common_length,
    head_end,
    joint_of,
    with_image_texts,
)
from milepost.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


V = TypeVar("V")

CUT = "\ufdd0"
"""A noncharacter: Unicode keeps it for uses inside a program."""


def special_texts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Returns a pattern of the texts that the tokenizer reads as special tokens; None if there are
    none. Tokens that are merely added (<think>, <tool_call>) do not count: they structure an
    answer, begin no role, and occur in what clients send back. Nor do tokens of a single character,
    which cannot be cut."""
    added = tokenizer.added_tokens_decoder.values()
    texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
    longer = [re.escape(text) for text in texts if len(text) > 1]
    return re.compile("|".join(longer)) if longer else None


def cut(value: V, special: re.Pattern[str]) -> V:
    """Returns a copy of a JSON value with every special token in its texts cut in two."""
    holder: list[Any] = [value]
    todo: list[tuple[Any, Any]] = [(holder, 0)]
    while todo:
        owner, key = todo.pop()
        item = owner[key]
        if isinstance(item, str):
            owner[key] = _cut(item, special)
        elif isinstance(item, Mapping):
            copy: Any = {_cut(k, special) if isinstance(k, str) else k: v for k, v in item.items()}
            owner[key] = copy
            todo += [(copy, name) for name in copy]
        elif isinstance(item, list | tuple):
            owner[key] = copy = list(item)
            todo += [(copy, place) for place in range(len(copy))]
    whole: V = holder[0]
    return whole


def _cut(text: str, special: re.Pattern[str]) -> str:
    return special.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text)


_MAX_REFUSAL = 1000
"""Number of characters of a template's refusal that are shown; it may quote the whole
conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A conversation as text, before it is tokenized."""

    pieces: list[str]
    """Pieces of the text. Each is tokenized by itself, so no special token spans two of them."""
    ends: list[int]
    """Ends of parts of the text, in characters; the separator between two pieces counts as one. The
    end of the system prompt comes first, then that of the last message, then the breakpoints."""

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    def places(self) -> list[list[int]]:
        """Returns the ends within each piece, in characters of the piece."""
        found, start = [], 0
        for piece in self.pieces:
            found.append([min(max(end - start, 0), len(piece)) for end in self.ends])
            start += len(piece) + 1
        return found

    def prompt(self, encoded: Sequence[tuple[list[int], list[int]]]) -> Prompt:
        """Returns the prompt. `encoded` has the token ids of each piece, and the number of its
        tokens before each end."""
        token_ids: list[int] = []
        positions = [0] * len(self.ends)
        for (ids, counts), places in zip(encoded, self.places(), strict=True):
            for number, count in enumerate(counts):
                if places[number] > 0:
                    positions[number] = len(token_ids) + count
            token_ids += ids
        inside = range(1, len(token_ids))
        return Prompt(
            text="".join(self.pieces),
            token_ids=token_ids,
            cache_marks=tuple(sorted({position for position in positions if position in inside})),
            breakpoints=tuple(position for position in positions[2:] if position in inside),
        )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], **options: Any
) -> Prompt:
    """Returns the token ids and marks of a conversation. The options are those of `compose`."""
    return tokenized(tokenizer, compose(tokenizer, messages, **options))


def tokenized(tokenizer: PreTrainedTokenizerBase, composed: Composed) -> Prompt:
    """Tokenizes a conversation. A token that reaches over an end counts as after it."""
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
    image_texts: Sequence[str] = (),
) -> Composed:
    """Returns the text of a conversation, and the ends of its parts.

    With `continue_final_message` it ends inside the last message, so that the answer continues it,
    and `add_generation_prompt` has no effect. A message or text part with a `cache_control` gets a
    mark at its end. So do the end of the system prompt and tools, and that of the last message.
    Parts that are images are written as `image_texts`, in order. Whatever matches `special` in
    messages, tools or arguments is read as text. `check` may refuse the text before the marks in it
    are looked for. Raises InvalidRequestError if there is no template, if it refuses the
    conversation, or if a message has something other than text.
    """
    if continue_final_message:
        ending = {"add_generation_prompt": False, "continue_final_message": True}
    else:
        ending = {"add_generation_prompt": add_generation_prompt}
    template_kwargs = dict(chat_template_kwargs or {})
    if special is not None:
        messages, tools = cut(messages, special), cut(tools, special)
        template_kwargs = cut(template_kwargs, special)
    if image_texts:
        messages = with_image_texts(messages, image_texts)
    conversation = BoundTemplate(tokenizer, tools, template_kwargs)
    joint = joint_of(conversation, messages)
    messages, checked, text = _taken(conversation, messages, ending, joint)
    if check is not None:
        check(text)
    ends = [
        head_end(conversation, checked, text),
        body_end(conversation, checked, text),
        *breakpoints(conversation, messages, checked, text, ending, joint),
    ]
    return Composed(pieces=text.split(CUT) if special is not None else [text], ends=ends)


def _taken(
    conversation: BoundTemplate,
    messages: Sequence[ChatMessage],
    ending: Mapping[str, bool],
    joint: str,
) -> tuple[Sequence[ChatMessage], list[dict[str, Any]], str]:
    """Returns the messages in a form that the template accepts, the same messages with plain text
    as contents, and the whole text. Raises InvalidRequestError if the template refuses every form.
    """
    for message in messages:
        _check_role(message)
    if not messages:
        raise InvalidRequestError("messages=[]: use one message or more")
    messages = roles.with_system_first(messages, conversation.text_if_taken, joint)
    refusal: Exception | None = None
    for put in itertools.chain([messages], roles.equivalents(messages, joint)):
        checked = [as_text(message, joint) for message in put]
        try:
            return put, checked, conversation.text(checked, ending)
        except REFUSALS as error:
            refusal = refusal or error
    why = str(refusal)[:_MAX_REFUSAL]
    raise InvalidRequestError(f"the chat template refuses the messages: {why}") from refusal


def _check_role(message: ChatMessage) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"message {message!r}: use a dict with a role and a content")


# --- characters to tokens -------------------------------------------------------------------------


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        prefixes = [tokenizer.encode(text[:end], add_special_tokens=False) for end in ends]
        return token_ids, [common_length(token_ids, prefix) for prefix in prefixes]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], tokens_before(encoding["offset_mapping"], ends)


def tokens_before(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """Returns the number of tokens before each end in a text."""
    token_ends = [end for _, end in offsets]
    return [bisect_left(token_ends, end + 1) for end in ends]
