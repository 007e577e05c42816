"""Follows one answer that keeps to a JSON schema, a regular expression, a choice or a grammar.

A guide belongs to one answer and follows its tokens; it is asked before each choice which tokens
may come. How a form is compiled is `grammars`' affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from milepost.engine.grammars import Form, problem_of


class Guide:
    """Follows one answer."""

    def __init__(
        self,
        form: Form,
        vocab_size: int,
        end_token_ids: Sequence[int],
        starts_after: int | None,
    ) -> None:
        self._form = form
        self._matcher = form.copy()
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._starts_after = starts_after

    @property
    def problem(self) -> str | None:
        """Why the form could not be followed to its end; None as long as it could."""
        return problem_of(self._matcher)

    def constrain(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come now to minus infinity, in place.

        A form that turns out too complex to follow lets the answer end; `problem` says so.
        """
        if self._starts_after is not None:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[list(self._end_token_ids)] = True
        else:
            flags = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed = torch.from_numpy(flags.astype(bool))
        logits.masked_fill_(~allowed.to(logits.device), -math.inf)

    def accept(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return
        self._form.num_followed += 1
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._form.wear_out()
