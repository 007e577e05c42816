"""What a step is to do (plans go out) and what it did (facts come in). Frozen; no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from milepost.cache.plans import Export, PageCopy, PageMove
from milepost.scheduler.request import FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One request's part of a step: compute `tokens`, which stand at positions from `start` on."""

    request: Request
    tokens: Sequence[int]
    start: int
    page_table: Sequence[int]
    """Page ids that cover at least start + len(tokens); append-only, so it is shared, not copied.
    """
    write_from: int
    """KV of tokens before this position is not written."""
    slot_in: int
    slot_out: int
    exports: Sequence[Export]
    page_copy: PageCopy | None
    """To be done before anything is computed."""
    samples: bool
    """Whether a token is sampled behind the last of `tokens`."""
    is_ahead: bool = False
    """The one token is what the step before samples, not known yet: `tokens` holds a stand-in."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """One token and nothing to export: the one-token kernels serve it."""
        return len(self.tokens) == 1 and not self.exports


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Sequences of one step, decodes first."""

    sequences: tuple[SequencePlan, ...]
    moves: tuple[PageMove, ...] = ()
    """To be done before anything else, in this order."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        return sum(sequence.is_decode for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The runner's report of one step."""

    tokens: Mapping[str, int]
    """Request id -> sampled token, for each sequence that samples."""
    written: Mapping[int, int]
    """Slot -> tokens that its contents have consumed, for each slot that was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A request's new token, and how it ended if it did."""

    request: Request
    token: int
    finish_reason: FinishReason | None
