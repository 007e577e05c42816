"""Keeps answers to a JSON schema, a regular expression, a choice or a grammar.

The work is llguidance's; here is what it needs from an engine and the other way round. A guide
belongs to one answer and follows its tokens; it is asked before each choice which tokens may come.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from milepost.errors import ConfigError, InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs

MAX_GRAMMAR_LEN = 2**18
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}
"""For JSON schemas: white space as people write it, but an end to it, which a small model does not
always find."""


def llguidance() -> Any:
    """The library. Raises ConfigError if it is not installed."""
    try:
        import llguidance as library
        import llguidance.hf
    except ModuleNotFoundError as error:
        raise ConfigError(
            "structured outputs need llguidance: install it with `pip install 'milepost[server]'`"
        ) from error
    return library


def grammar_of(wanted: StructuredOutputs) -> str:
    """In llguidance's own form."""
    matcher = llguidance().LLMatcher
    if wanted.json is not None:
        schema = wanted.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return matcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        return matcher.grammar_from_lark(wanted.grammar)
    options = " | ".join(json.dumps(choice) for choice in wanted.choice or ())
    return matcher.grammar_from_lark(f"start: {options}")


def check_structured(params: SamplingParams) -> None:
    """Raise InvalidRequestError for what cannot be kept to."""
    wanted = params.structured_outputs
    if wanted is None:
        return
    if params.ignore_eos or params.min_tokens:
        raise InvalidRequestError(
            "structured_outputs with ignore_eos or min_tokens: the form says where an answer ends"
        )
    try:
        grammar = grammar_of(wanted)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs: {_first_line(error)}") from error
    if len(grammar) > MAX_GRAMMAR_LEN:
        raise InvalidRequestError(
            f"structured_outputs of {len(grammar)} characters: use {MAX_GRAMMAR_LEN} or fewer"
        )
    problem = llguidance().LLMatcher.validate_grammar(grammar)
    if problem:
        raise InvalidRequestError(f"structured_outputs: {problem.splitlines()[0]}")


class Guides:
    """Makes the guides of one engine."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._library = llguidance()
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._tokenizer = self._library.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=self._end_token_ids or None
        )

    def make(self, wanted: StructuredOutputs) -> Guide:
        """Raises InvalidRequestError for a form that this tokenizer cannot write."""
        matcher = self._library.LLMatcher(self._tokenizer, grammar_of(wanted), log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(f"structured_outputs: {matcher.get_error().splitlines()[0]}")
        return Guide(matcher, self._vocab_size, self._end_token_ids, wanted.starts_after)


class Guide:
    """Follows one answer."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_token_ids: Sequence[int],
        starts_after: int | None,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._starts_after = starts_after

    def constrain(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come now to minus infinity, in place.

        A form that turns out too complex to follow lets the answer end.
        """
        if self._starts_after is not None:
            return
        if self._matcher.is_error():
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[list(self._end_token_ids)] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            flags = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed = torch.from_numpy(flags.astype(bool))
        logits.masked_fill_(~allowed.to(logits.device), -math.inf)

    def accept(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
        elif not self._matcher.is_error() and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
