"""Conversations, tokens and text: renders and tokenizes prompts, and turns tokens into text.
Its modules:

    rendering a conversation    chat, template, marks, roles, special, conversations
    in a process of its own     process, __main__
    tokens of a text            tokenizer, lengths
    text of tokens              detokenizer, token_texts
    a checkpoint's defaults     generation_config
"""

from milepost.engine.text.chat import ChatPrompt
from milepost.engine.text.conversations import Rendered, Template, Unrendered, content_of
from milepost.engine.text.detokenizer import Detokenizer, detokenizer_for
from milepost.engine.text.generation_config import (
    end_token_ids,
    overridden,
    sampling_defaults,
    with_defaults,
    within,
)
from milepost.engine.text.lengths import FewestTokens
from milepost.engine.text.process import Encoded, Start, Text, TextProcess, Texts
from milepost.engine.text.special import special_texts
from milepost.engine.text.token_texts import TokenTexts
from milepost.engine.text.tokenizer import load_tokenizer, without_torch

__all__ = [
    "ChatPrompt",
    "Detokenizer",
    "Encoded",
    "FewestTokens",
    "Rendered",
    "Start",
    "Template",
    "Text",
    "TextProcess",
    "Texts",
    "TokenTexts",
    "Unrendered",
    "content_of",
    "detokenizer_for",
    "end_token_ids",
    "load_tokenizer",
    "overridden",
    "sampling_defaults",
    "special_texts",
    "with_defaults",
    "within",
    "without_torch",
]
