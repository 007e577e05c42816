"""Keeps text that somebody else wrote from being read as special tokens.

A chat template writes special tokens (<|im_start|>, <|im_end|>) around what people say. A tokenizer
recognises them wherever they stand, so a message that contains them could end itself and go on in
another role. Here they are cut in two before the template sees them: the cut is a character that
stands in no text, and where it stands the rendered text is tokenized in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

V = TypeVar("V")

CUT = "\ufdd0"
"""A noncharacter: Unicode keeps it for uses inside a program."""


def special_texts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Returns a pattern of the texts that the tokenizer reads as special tokens; None without
    any.

    Tokens that are merely added (<think>, <tool_call>) are none: they structure an answer, begin no
    role, and are in what clients send back. One of a single character cannot be cut.
    """
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
            own: Any = {_cut(k, special) if isinstance(k, str) else k: v for k, v in item.items()}
            owner[key] = own
            todo += [(own, name) for name in own]
        elif isinstance(item, list | tuple):
            owner[key] = own = list(item)
            todo += [(own, place) for place in range(len(own))]
    return holder[0]


def _cut(text: str, special: re.Pattern[str]) -> str:
    return special.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text)
