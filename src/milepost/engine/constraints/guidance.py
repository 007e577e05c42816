"""Follows one answer that must match a JSON schema, a regular expression, a choice or a grammar.

`grammars` compiles forms; `guide` combines this with an answer's other restrictions.

Legend: W words of a mask, 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milepost.engine.constraints.grammars import CompiledForm, llguidance, problem_of

Mask = NDArray[np.int32]


def mask_of(vocab_size: int, token_ids: Sequence[int]) -> Mask:
    """Returns a mask [W] of exactly these tokens: bit i of word w is token 32 w + i."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class FormGuide:
    """Tracks the place of one answer in its form, and makes the masks of its next tokens."""

    def __init__(
        self,
        form: CompiledForm,
        vocab_size: int,
        end_token_ids: Sequence[int],
        starts_after: int | None,
    ) -> None:
        self.matcher = form.copy()
        self.vocab_size = vocab_size
        self._form = form
        self._added = np.array([i for i in form.spelled if i < vocab_size], np.uint32)
        self._end_token_ids = end_token_ids
        self._starts_after = starts_after

    @property
    def problem(self) -> str | None:
        """Why the form could not be followed to its end; None while it can."""
        return problem_of(self.matcher)

    @property
    def is_bound(self) -> bool:
        """Whether the answer has reached the point where its form begins."""
        return self._starts_after is None

    @property
    def may_end(self) -> bool:
        """Whether the answer satisfies its form if it ends here."""
        matcher = self.matcher
        return self.is_bound and (matcher.is_accepting() or matcher.is_stopped())

    def copy(self) -> FormGuide:
        """Returns a copy, to follow tokens that are not certain."""
        guide = copy(self)
        guide.matcher = self.matcher.deep_copy()
        return guide

    def follows(self, token_id: int) -> bool:
        """Advances a copy over a token that is not certain. Returns False if it may not come, or
        nothing after it."""
        if self.matcher.is_error() or not self.allows(token_id):
            return False
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return True
        self.matcher.consume_token(token_id)
        return not self.matcher.is_error() and not self.matcher.is_stopped()

    def ends(self) -> Mask:
        """Returns a mask [W] of the tokens that end an answer."""
        return mask_of(self.vocab_size, self._end_token_ids)

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next. Used for tokens that were sampled without their mask."""
        if self._starts_after is not None or self.matcher.is_error():
            return True
        return bool(self.matcher.validate_tokens([token_id]) == 1)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens, in order, the form allows next; all of them before the
        form begins."""
        if self._starts_after is not None or self.matcher.is_error():
            return len(token_ids)
        return int(self.matcher.validate_tokens(list(token_ids)))

    def spell(self, mask: Mask) -> None:
        """Corrects a mask that allows an added token where its text should be spelled out. If only
        one text can follow, llguidance allows only the token that its tokenizer makes of it. That
        may be an added token (`<tool_call>`), which its grammars do not treat as text."""
        bits = mask.view(np.uint32)
        allowed = self._added[bits[self._added >> 5] >> (self._added & 31) & 1 == 1]
        if not len(allowed) or self.matcher.is_stopped() or self.matcher.is_accepting():
            return  # where an answer may end, more than one thing can follow
        for added in allowed.tolist():
            if self.matcher.validate_tokens([added]) == 0:
                first = self._form.spelled[added]
                bits[added >> 5] &= ~np.uint32(1 << (added & 31))
                bits[first >> 5] |= np.uint32(1 << (first & 31))

    def accept(self, token_id: int) -> None:
        """Advances the form by the token that was chosen."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return
        self._form.num_followed += 1
        if not self.matcher.is_error() and not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)
        if self.matcher.is_error():
            self._form.wear_out()


def form_masks(guides: Sequence[FormGuide | None]) -> list[Mask | None]:
    """Returns a mask [W] of the allowed next tokens for each answer: bit i of word w is token 32 w
    + i. None allows all. The masks are computed in parallel, in threads. A form that turns out too
    complex ends its answer; `FormGuide.problem` gives the reason."""
    bound = {i: guide for i, guide in enumerate(guides) if guide is not None and guide.is_bound}
    found: list[Mask | None] = [None] * len(guides)
    if not bound:
        return found
    num_words = -(-max(guide.vocab_size for guide in bound.values()) // 32)
    # A tokenizer may have more tokens than the model; what does not fit is cut.
    words = np.zeros((len(guides), num_words), np.int32)
    matchers = [(g.matcher, i) for i, g in bound.items() if not g.matcher.is_error()]
    if matchers:
        _executor().unsafe_compute_mask_ptr(
            matchers, words.ctypes.data, words.strides[0], len(words)
        )
    for i, guide in bound.items():
        if guide.matcher.is_error():
            found[i] = guide.ends()
        else:
            guide.spell(words[i])
            found[i] = words[i]
    return found


@cache
def _executor() -> Any:
    return llguidance().LLExecutor()
