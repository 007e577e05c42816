"""What a step is to do (plans go out) and what it did (results come in), as data.

Plans and results name requests by number and hold no live objects: msgpack encodes them without
hooks, and the same plans, run in order by two runners, leave the same pools. A plan says what has
changed since the previous one: the runner keeps each request's page table, and drops it when a plan
names the request in `ended`. A request that was preempted, or whose step was rolled back, ends
there, and comes again with a whole table.

Sampling has a message of its own (`StepSampling`), since a form's masks are known only once the
tokens before are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from milepost.cache.plans import Arrival, Export, PageCopy, PageMove, What
from milepost.sampling_params import SamplingParams


class Store(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copy something that is cached out of the device: behind so many of the plan's moves, and
    before anything else, since it may be written over from then on.
    """

    key: bytes
    what: What
    id: int
    place: int
    """Where to, in the terms of whoever keeps it."""
    num_moves: int


class PromptScoring(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How likely tokens of a chunk's prompt were is asked for."""

    targets: bytes
    """The tokens behind each of the chunk's, as packed uint32; one fewer where the prompt ends."""
    num_top: int
    """Of the likeliest tokens beside each."""


class SequencePlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request's part of a step: compute `num_tokens` tokens that stand at positions from
    `start` on.
    """

    number: int
    """Of the request."""
    start: int
    num_tokens: int
    tokens: bytes
    """Their ids as packed little-endian uint32; empty if `is_ahead`."""
    new_pages: tuple[int, ...]
    """Page ids that the page table has grown by; it covers at least `end` then."""
    write_from: int
    """KV of tokens before this position is not written."""
    slot_in: int
    slot_out: int
    samples: bool
    """Whether a token is sampled behind the last one."""
    is_ahead: bool = False
    """The one token is what the step before samples: the runner knows it first."""
    exports: tuple[Export, ...] = ()
    page_copy: PageCopy | None = None
    """To be done before anything is computed."""
    scoring: PromptScoring | None = None
    history: bytes | None = None
    """The ids before `start`, packed likewise: with a table's first pages, where sampling reads
    them and the runner is to keep them from now on."""
    fold: int = 0
    """Accepted tokens, computed before, to fold into the state first."""
    num_drafts: int = 0
    """How many of the last tokens are drafts."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> Sequence[int]:
        """Ids of the last tokens, that may be rejected."""
        return array("I", self.tokens)[self.num_tokens - self.num_drafts :]

    @property
    def is_decode(self) -> bool:
        """One token besides drafts, or none, and nothing to export: the kernels of decoding serve
        it."""
        return self.num_tokens - self.num_drafts <= 1 and not self.exports

    @property
    def verifies(self) -> bool:
        """Of a decode: whether it takes more than that one token."""
        return self.fold > 0 or self.num_tokens != 1

    @property
    def state_end(self) -> int:
        """Tokens that the state has consumed behind the step."""
        return self.end - self.num_drafts


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Fill a request's pages and slot from outside, so that it goes on at `position`. To be begun
    once the plan's moves are made; nothing is planned for the request until it is over.
    """

    number: int
    """Of the request."""
    source: str
    position: int
    arrivals: tuple[Arrival, ...]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Sequences of one step, decodes first."""

    sequences: tuple[SequencePlan, ...]
    moves: tuple[PageMove, ...] = ()
    """To be done before anything else, in this order."""
    ended: tuple[int, ...] = ()
    """Requests whose page tables are to be dropped first; one may come again in this very plan."""
    stores: tuple[Store, ...] = ()
    """To be copied out of the device, each behind as many moves as it says."""
    loads: tuple[Load, ...] = ()
    """To be begun behind the moves, and not to be waited for."""

    @property
    def only_copies(self) -> bool:
        """Whether nothing is computed and something copied: then it has no outcome."""
        return not self.sequences and bool(self.moves or self.stores or self.loads)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        return sum(sequence.is_decode for sequence in self.sequences)

    @property
    def verifies(self) -> bool:
        """Whether a decode takes more than one token."""
        return any(sequence.is_decode and sequence.verifies for sequence in self.sequences)

    @property
    def sampled_numbers(self) -> list[int]:
        """Requests that sample, by number: once for their last token, and once for each that a
        draft stands behind."""
        numbers: list[int] = []
        for sequence in self.sequences:
            if sequence.samples:
                numbers += [sequence.number] * (1 + sequence.num_drafts)
        return numbers

    @property
    def num_drafts(self) -> int:
        """The most that a sequence has."""
        return max((sequence.num_drafts for sequence in self.sequences), default=0)


class SamplingPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What the choice of one request's next token depends on, besides its logits and its tokens."""

    number: int
    """Of the request."""
    params: SamplingParams
    seed: int
    """This sample's own seed (`SamplingParams.sample_seed`)."""
    num_prompt_tokens: int
    index: int
    """Of the draw: the answer's tokens before it."""
    num_ahead: int = 0
    """How many of these are chosen but not known yet to who makes the plan."""
    num_drafts: int = 0
    """Of the step: those behind this sample are no part of what it depends on."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that may not be chosen now: those that end an answer, while it is below min_tokens."""
    mask: bytes | None = None
    """Tokens that an answer of this form may have now: bit i of byte b is token 8 b + i."""


class StepSampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """How the tokens of a step are chosen: of all its sequences that sample, in their order, with
    1 + num_drafts rows each."""

    rows: tuple[SamplingPlan, ...]
    num_drafts: int = 0
    """How many tokens the model's head drafts behind each, at most."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The runner's report of one step."""

    tokens: dict[int, list[int]]
    """Request number -> the run of tokens that was sampled, for each sequence that samples."""
    written: dict[int, int]
    """Slot -> tokens that its contents have consumed, for each slot that was written."""
    seconds: float = 0.0
    """Since the outcome of the step before, as far as the engine was busy."""
