"""Enforces allowed_token_ids, bad_words, biases that exclude a token, and thinking_token_budget, as
vLLM names them.

Rules are the same for all answers with the same parameters. A Restriction follows one answer's
tokens, and says before each choice which of all tokens are allowed. An excluded token never comes:
the budget waits until its token is allowed, and if no token is allowed the answer ends (`guide`).
Parameters that contradict each other from the start are refused.

Legend: W words of a mask, 32 tokens each: bit i of word w is token 32 w + i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milepost.engine.constraints.guidance import Mask, mask_of
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams

THINK = ("<think>", "</think>")
"""The tokens between which models reason."""
MAX_RULES = 64
"""Number of sets of rules to remember."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """The rules for all answers with the same parameters."""

    allowed: Mask | None
    """Mask [W] of the tokens that are allowed unless a banned sequence or the budget excludes them;
    None for all. Never empty."""
    names: str
    """Names of the parameters that exclude tokens, for errors."""
    runs: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]
    """Banned sequences of two tokens or more, as (all but the last, last), keyed by the last but
    one."""
    budget: int | None
    """Largest number of tokens between `opens` and `closes`."""
    opens: int | None
    closes: int | None
    closing: Mask
    """Mask [W] of `closes` alone."""
    every: Mask
    """Mask [W] of all of the model's tokens."""

    @cached_property
    def reach(self) -> int:
        """Number of the latest tokens that the banned sequences depend on."""
        return max((len(run) for runs in self.runs.values() for run, _ in runs), default=0)


class Restriction:
    """Tracks the tokens of one answer, and makes the masks of its next tokens by `rules`."""

    def __init__(self, rules: Rules, prompt: NDArray[np.uint32]) -> None:
        self._rules = rules
        self._newest: tuple[int, ...] = ()
        self._num_thought = 0
        self._is_thinking = rules.budget is not None and _is_open(rules, prompt)

    def waits_for(self, num_tokens: int) -> bool:
        """Whether the next token is constrained by the last `num_tokens`, which are not known."""
        rules = self._rules
        if rules.runs:
            return True
        return rules.budget is not None and self._num_thought + num_tokens >= rules.budget

    @property
    def names(self) -> str:
        """The parameters that exclude tokens."""
        return self._rules.names

    def copy(self) -> Restriction:
        """Returns a copy, to follow tokens that are not certain."""
        return copy(self)

    def mask(self, *, counts: bool = True) -> Mask | None:
        """Returns a read-only mask [W] of the tokens allowed now; None if all are. The reasoning
        budget applies if `counts` is set."""
        rules = self._rules
        runs = rules.runs.get(self._newest[-1], ()) if self._newest else ()
        banned = [last for before, last in runs if self._ends_with(before)]
        left = rules.allowed
        if banned:
            left = without(rules.every if left is None else left, banned)
        if counts and self._has_thought_enough and (left is None or (left & rules.closing).any()):
            return rules.closing
        return left

    def allows(self, token_id: int, *, counts: bool = True) -> bool:
        """Whether a token may come now."""
        mask = self.mask(counts=counts)
        return mask is None or has(mask, token_id)

    def num_allowed(self, token_ids: Sequence[int], *, counts: bool = True) -> int:
        """Returns how many of these may come, one after the other."""
        ahead = self.copy()
        for num, token_id in enumerate(token_ids):
            if not ahead.allows(token_id, counts=counts):
                return num
            ahead.accept(token_id)
        return len(token_ids)

    def accept(self, token_id: int) -> None:
        """Notes the token that was chosen."""
        rules = self._rules
        if rules.runs:
            self._newest = (*self._newest, token_id)[-rules.reach :]
        if rules.budget is None:
            return
        if self._is_thinking and token_id != rules.closes:
            self._num_thought += 1
        self._is_thinking = token_id == rules.opens or (
            self._is_thinking and token_id != rules.closes
        )

    @property
    def _has_thought_enough(self) -> bool:
        budget = self._rules.budget
        return budget is not None and self._is_thinking and self._num_thought >= budget

    def _ends_with(self, before: tuple[int, ...]) -> bool:
        return self._newest[-len(before) :] == before


class RuleBook:
    """Makes the rules of one model's requests, in any thread. `vocab_size` and `end_token_ids` are
    the model's; without a tokenizer only token ids can be named. Raises InvalidRequestError for
    rules that cannot be enforced."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._known = lru_cache(MAX_RULES)(self._rules)

    def rules_of(self, params: SamplingParams) -> Rules | None:
        """Returns the rules of a request, or None if it asks for nothing beyond logit biases."""
        words, excluded = params.bad_words or (), params.excluded_ids
        allowed, budget = params.allowed_token_ids, params.thinking_token_budget
        if allowed is None and not words and budget is None and not excluded:
            return None
        ends: tuple[int, ...] = ()
        if params.min_tokens:
            ends = (*(params.stop_token_ids or ()), *self._ends(params))
        rules = self._known(allowed, words, budget, excluded, ends)
        is_only_biased = allowed is None and not words and budget is None
        return None if is_only_biased and params.structured_outputs is None else rules

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return () if params.ignore_eos else self._end_token_ids

    def _rules(
        self,
        ids: tuple[int, ...] | None,
        words: tuple[str, ...],
        budget: int | None,
        excluded: tuple[int, ...],
        ends: tuple[int, ...],
    ) -> Rules:
        """`ends` may not come at first."""
        opens, closes = self._think_ids(budget)
        runs = self._spellings(words)
        banned = [run[0] for run in runs if len(run) == 1]
        every = mask_of(self._vocab_size, range(self._vocab_size))
        given = every if ids is None else mask_of(self._vocab_size, ids)
        kinds = {"allowed_token_ids": ids is not None, "bad_words": words, "logit_bias": excluded}
        rules = Rules(
            allowed=without(given, (*banned, *excluded)),
            names=" and ".join(name for name, is_given in kinds.items() if is_given),
            runs=_by_last([(run[:-1], run[-1]) for run in runs if len(run) > 1]),
            budget=budget,
            opens=opens,
            closes=closes,
            closing=mask_of(self._vocab_size, () if closes is None else (closes,)),
            every=every,
        )
        _judge(rules, ends)
        is_free = ids is None and not banned and not excluded
        return replace(rules, allowed=None) if is_free else rules

    def _think_ids(self, budget: int | None) -> tuple[int | None, int | None]:
        """Returns the tokens that open and close the reasoning, if there is a budget."""
        if budget is None:
            return None, None
        return think_ids(self._tokenizer)

    def _spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of each word, at the beginning of a text and after a space."""
        if not words:
            return []
        if self._tokenizer is None:
            raise InvalidRequestError("bad_words: no tokenizer is loaded, so use logit_bias")
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        found = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return list(dict.fromkeys(tuple(ids) for ids in found if ids))


def _judge(rules: Rules, ends: Sequence[int]) -> None:
    """Raises InvalidRequestError for parameters that leave no token to choose; `ends` may not come
    first."""
    allowed = rules.allowed
    assert allowed is not None, "what all tokens are judged by"
    if not allowed.any():
        raise InvalidRequestError(f"{rules.names}: they leave no token that may come")
    if ends and not without(allowed, ends).any():
        raise InvalidRequestError(
            f"min_tokens: {rules.names} leave only tokens that end the answer: leave it out, or "
            "allow others"
        )
    if rules.closes is not None and not has(allowed, rules.closes):
        raise InvalidRequestError(
            f"thinking_token_budget={rules.budget}: {rules.names} exclude {THINK[1]}, which closes "
            "the reasoning: allow it, or leave the budget out"
        )
    if rules.closes in ends:
        raise InvalidRequestError(
            f"thinking_token_budget={rules.budget}: {THINK[1]}, which closes the reasoning, ends "
            "the answer here, and min_tokens keeps it from coming: leave one of them out"
        )


def _by_last(
    runs: Sequence[tuple[tuple[int, ...], int]],
) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for before, last in runs:
        found.setdefault(before[-1], []).append((before, last))
    return found


def think_ids(tokenizer: Any) -> tuple[int | None, int | None]:
    """Returns the ids of the tokens that open and close the reasoning; None for one that the
    tokenizer lacks."""
    added = {} if tokenizer is None else tokenizer.get_added_vocab()
    opens, closes = (added.get(tag) for tag in THINK)
    return opens, closes


def _is_open(rules: Rules, prompt: NDArray[np.uint32]) -> bool:
    """Whether a prompt ends within the reasoning that its last `opens` begins."""
    if rules.opens is None:
        return False
    tags = np.flatnonzero((prompt == rules.opens) | (prompt == rules.closes))
    return bool(len(tags)) and int(prompt[tags[-1]]) == rules.opens


def has(mask: Mask, token_id: int) -> bool:
    """Whether a mask has a token."""
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


def without(mask: Mask, token_ids: Sequence[int]) -> Mask:
    """Returns `mask` without these tokens."""
    ids = np.array(token_ids, np.uint32)
    less = mask.copy()
    np.bitwise_and.at(less.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31)))
    return less
