"""One request from waiting to its one terminal event, and the progress that each step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from milepost.cache.allocation import Allocation
from milepost.cache.report import CacheReport
from milepost.cache.tree import Chain, Reservation

if TYPE_CHECKING:
    from milepost.scheduler.sharing import Shared


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt and its answer so far. `chain` holds both; whoever makes the request sets the
    limits. It waits while `allocation` is None, runs while it isn't, and is over once
    `finish_reason` is set."""

    id: str
    chain: Chain
    max_tokens: int
    """Largest number of answer tokens: at least 1, or 0 to compute only the prompt."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer. They include the model's end-of-sequence tokens unless these are
    ignored."""
    marks: tuple[int, ...] = ()
    """Positions in the prompt, ascending, where a state is worth keeping."""
    priority: int = 0
    """Lower values are served first."""
    num_prompt_logprobs: int | None = None
    """If set, the runner scores the prompt's tokens, and reports this many of the likeliest at each
    position."""
    is_bitwise: bool = False
    """Whether prompt tokens are always computed by prefill kernels, and answer tokens by decode
    kernels, even after a preemption."""
    most_replayed: int = 0
    """Largest number of answer tokens that a step of a bitwise request computes again as drafts."""
    keeps_history: bool = False
    """Whether the runner keeps the request's tokens because sampling reads them."""
    number: int = -1
    """Identifies the request in plans. The scheduler numbers requests in the order of `add`."""
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    """Number of tokens of the prompt and the answer so far."""
    allocation: Allocation | None = None
    reservation: Reservation | None = None
    """Claim on what it would resume from, while it waits."""
    report: CacheReport | None = None
    """The cache's report on the prompt, from the first admission."""
    num_preemptions: int = 0
    blocked_at: tuple[int, int, int] | None = None
    """Room in the memory when it last found too little."""
    looked_at: int = 0
    """Number of requests admitted by the time when it last checked what others compute."""
    num_planned_pages: int = 0
    """Number of pages of its page table that plans have named."""
    num_planned_windows: int = 0
    """Number of its window pages that plans have named."""
    awaits: Shared | None = None
    """The prefix that it waited for when it last checked what others compute."""
    offered: int = 0
    """Number of its tokens that can be loaded from outside, as last looked up."""
    num_bypasses: int = 0
    """Number of later requests that were admitted while this one found no tokens or no room."""
    queued_s: float = 0.0
    """Time at which it began to wait, in seconds of steps."""
    held_until_s: float | None = None
    """Time until which it is held back for what it displaces, as last estimated."""
    num_idle_steps: int = 0
    """Number of steps without tokens since it last got some, while it runs."""
    drafts: tuple[int, ...] = ()
    """Drafts: tokens that may follow its first `drafts_from` tokens."""
    drafts_from: int = 0
    awaits_drafts: bool = False
    """Whether its next drafts depend on tokens that are not known yet. If so, no step is planned
    ahead for it."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = len(self.chain)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends the answer's next tokens."""
        self.chain.extend(tokens)
        self.num_tokens += len(tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.chain.tokens[self.num_prompt_tokens :].tolist()

    @property
    def num_computed_tokens(self) -> int:
        return self.allocation.committed if self.allocation is not None else 0

    @property
    def num_left(self) -> int:
        """Number of tokens of a running request for which no step is planned, including the one
        that is being sampled. For a bitwise request: those of its prompt, then one at a time."""
        assert self.allocation is not None
        planned = self.allocation.planned
        if self.is_bitwise:
            return max(self.num_prompt_tokens - planned, 1)
        return self.num_tokens - planned or 1

    @property
    def is_at_prompt(self) -> bool:
        """Whether the next tokens of a running bitwise request are its prompt's."""
        assert self.allocation is not None
        return self.is_bitwise and self.allocation.planned < self.num_prompt_tokens

    @property
    def num_replayed(self) -> int:
        """Number of answer tokens, after the next one, that a step may compute again as drafts when
        a bitwise request returns. The last known token is left to a step that samples."""
        assert self.allocation is not None
        if not self.most_replayed or self.is_at_prompt:
            return 0
        return min(self.most_replayed, max(self.num_tokens - self.allocation.planned - 2, 0))

    @property
    def is_in_flight(self) -> bool:
        """Whether a step for it is planned whose outcome has not been taken."""
        return self.allocation is not None and self.allocation.is_in_flight

    @property
    def is_loading(self) -> bool:
        """Whether its pages and slot are being filled from outside."""
        return self.allocation is not None and self.allocation.is_loading

    @property
    def is_sampling(self) -> bool:
        """Whether a step in flight samples a token for it."""
        return self.allocation is not None and self.allocation.planned == self.num_tokens

    @property
    def goes_on(self) -> bool:
        """Whether a further step can be planned now: the answer may continue after the token being
        sampled, and its position is known."""
        allocation = self.allocation
        if allocation is not None and (allocation.is_loading or allocation.is_verifying):
            return False
        return self.may_go_on and not (self.awaits_drafts and self.is_sampling)

    @property
    def may_go_on(self) -> bool:
        """Whether the answer may continue after the tokens being sampled."""
        if self.finish_reason is not None:
            return False
        return not self.is_sampling or self.num_output_tokens + 1 < self.max_tokens

    @property
    def is_computed(self) -> bool:
        """Whether it only computes its prompt, and has done so."""
        return not self.max_tokens and self.num_computed_tokens == self.num_tokens

    @property
    def holds_seat(self) -> bool:
        """Whether the next steps may have a part for this running request, if only to fold the
        answer's last tokens into its state."""
        allocation = self.allocation
        assert allocation is not None
        ends = allocation.is_loading or allocation.is_verifying or allocation.num_unfolded > 0
        return ends or self.may_go_on

    @property
    def rank(self) -> tuple[int, int]:
        """Requests with lower ranks are served first and preempted last."""
        return (self.priority, self.number)

    def cut(self, run: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Returns how many of the next tokens belong to the answer, and its finish reason if they
        end it."""
        num_tokens = self.num_tokens - self.num_prompt_tokens
        if num_tokens + len(run) < self.max_tokens and self.stop_token_ids.isdisjoint(run):
            return len(run), None  # the usual case: the answer goes on
        for num, token in enumerate(run, start=1):
            num_tokens += 1
            if token in self.stop_token_ids and num_tokens >= self.min_tokens:
                return num, FinishReason.STOP
            if num_tokens >= self.max_tokens:
                return num, FinishReason.LENGTH
        return len(run), None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A request's new tokens, and how it ended if it did."""

    request: Request
    tokens: list[int]
    finish_reason: FinishReason | None
