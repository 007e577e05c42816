"""How a router's logits become choices and shares, where a softmax is not all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of a token's experts; hashable."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """Sigmoid scores are taken from logits as they are, unrounded."""
    num_groups: int = 1
    """Experts stand in so many groups of neighbours, of which the best are looked at: those whose
    two best experts have the greatest sums."""
    num_groups_chosen: int = 1
    norm_eps: float = 0.0
    """Added to the sum that shares are divided by."""
    scale: float = 1.0
    """Of the shares, but for the shared expert's."""
    gates_shared: bool = True
    """The shared experts' share is the sigmoid of the last logit; else it is 1, with no logit."""

    @property
    def is_plain(self) -> bool:
        """A softmax is all, and shared experts have a gate."""
        return self == Scores()


SOFTMAX = Scores()
