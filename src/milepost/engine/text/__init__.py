"""Conversations, tokens and text: renders and tokenizes prompts, and turns tokens into text.
Its modules:

    rendering a conversation    chat, template, roles, conversations
    in a process of its own     process
    for many callers            encoder, lanes
    tokens of a text            tokenizer, lengths
    text of tokens              detokenizer, token_texts
    a checkpoint's defaults     generation_config
"""

from milepost.engine.text.chat import special_texts
from milepost.engine.text.detokenizer import Detokenizer, detokenizer_for
from milepost.engine.text.encoder import Encoder
from milepost.engine.text.generation_config import (
    end_token_ids,
    sampling_defaults,
    with_defaults,
    with_overrides,
    within_vocabulary,
)
from milepost.engine.text.lanes import MAX_SHORT, Lane
from milepost.engine.text.lengths import BYTE_LEVEL, text_length
from milepost.engine.text.token_texts import TokenTexts, text_of
from milepost.engine.text.tokenizer import load_tokenizer, tokenizer_for, without_torch

__all__ = [
    "BYTE_LEVEL",
    "MAX_SHORT",
    "Detokenizer",
    "Encoder",
    "Lane",
    "TokenTexts",
    "detokenizer_for",
    "end_token_ids",
    "load_tokenizer",
    "sampling_defaults",
    "special_texts",
    "text_length",
    "text_of",
    "tokenizer_for",
    "with_defaults",
    "with_overrides",
    "within_vocabulary",
    "without_torch",
]
