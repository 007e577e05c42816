"""Plans (the work of a step) and results (its outcome), as data.

Plans and results name requests by number and hold no live objects. msgpack encodes them without
hooks, and two runners that run the same plans in order have the same pools. A plan holds the
changes since the previous one: the runner keeps each request's page table, and drops it when a plan
names the request in `ended`. A request that was preempted, or whose step was rolled back, ends
there and returns with a whole table.

Sampling has a message of its own (`StepSampling`), since the masks of an output constraint are only
known once the previous tokens are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from milepost.cache import ZERO_SLOT
from milepost.cache.plans import Arrival, Export, PageCopy, PageMove, What
from milepost.pictures import Picture
from milepost.sampling_params import SamplingParams


class Store(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Copies a cached item out of the device, after the first `num_moves` of the plan's moves and
    before anything else, since the item may be overwritten from then on."""

    key: bytes
    what: What
    id: int
    place: int
    """Destination, as numbered by the keeper that stores the item."""
    num_moves: int
    windows: tuple[int, ...] = ()
    """Window pages that belong to a state."""


class PromptScoring(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Asks for the log-probabilities of a chunk's prompt tokens."""

    targets: bytes
    """The token after each token of the chunk, as packed uint32; one fewer at the prompt's end."""
    num_top: int
    """Number of likeliest tokens to report for each position."""


class SequencePlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request's part of a step: computes `num_tokens` tokens at positions from `start` on."""

    number: int
    """The request's number."""
    start: int
    num_tokens: int
    tokens: bytes
    """Token ids as packed little-endian uint32; empty if `is_ahead`."""
    new_pages: tuple[int, ...]
    """Page ids to append to the page table, which then covers at least `end`."""
    write_from: int
    """KV of tokens before this position is not written."""
    slot_in: int
    slot_out: int
    samples: bool
    """Whether to sample a token after the last one."""
    is_ahead: bool = False
    """Whether the one token is the token sampled by the previous step, which only the runner knows
    yet.
    """
    exports: tuple[Export, ...] = ()
    page_copy: PageCopy | None = None
    """Copy of a page to make before anything is computed."""
    scoring: PromptScoring | None = None
    history: bytes | None = None
    """Token ids before `start`, packed like `tokens`. Sent with a table's first pages if sampling
    reads them; the runner keeps them from then on.
    """
    fold: int = 0
    """Number of accepted tokens, computed earlier, to fold into the state first."""
    num_drafts: int = 0
    """Number of drafts among the last tokens. If nothing is sampled, they are known to be right."""
    is_prompt: bool = False
    """Whether the prefill kernels serve this part, even if it has only one token."""
    pictures: tuple[Picture, ...] = ()
    """Pictures that some of the tokens belong to, in order."""
    shift: int = 0
    """Rotary position of the first token minus its index (see `pictures.position_shift`)."""
    new_windows: tuple[int, ...] = ()
    """Ids to append to the table of window pages, some of them HOLE; the table then covers at least
    `end`. Empty in models without sliding windows. Whatever is computed is written there."""
    window_copy: PageCopy | None = None
    """Copy of a window page to make before anything is computed."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def drafts(self) -> Sequence[int]:
        """Ids of the drafts, which are the last tokens. They may be rejected if the request
        samples."""
        return array("I", self.tokens)[self.num_tokens - self.num_drafts :]

    @property
    def is_decode(self) -> bool:
        """Whether the decode kernels serve this part: it has at most one token besides drafts, and
        exports nothing."""
        is_short = self.num_tokens - self.num_drafts <= 1
        return is_short and not self.exports and not self.is_prompt

    @property
    def verifies(self) -> bool:
        """Whether a decode has more work than one token."""
        return self.fold > 0 or self.num_tokens != 1

    @property
    def shift_after(self) -> int:
        """The shift of the token after the last one, which is not in a picture."""
        return self.shift + sum(each.num_positions - each.num_tokens for each in self.pictures)

    @property
    def state_end(self) -> int:
        """Number of tokens that the state has consumed after the step."""
        return self.end - self.num_drafts


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Fills a request's pages and slot from outside, so that it can continue at `position`. The
    load begins after the plan's moves, and the request is not planned again until the load is over.
    """

    number: int
    """The request's number."""
    source: str
    position: int
    arrivals: tuple[Arrival, ...]


class EncodePart(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A part of the tower's layers for one picture. Large pictures are encoded over several steps,
    so that none takes long."""

    picture: Picture
    first: int
    """Number of the first part to run."""
    end: int
    """One more than the number of the last part to run."""
    num_parts: int
    """Number of parts that the layers are divided into."""

    @property
    def is_last(self) -> bool:
        """Whether the picture is encoded after this part."""
        return self.end == self.num_parts


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The work of one step; decodes come first among its sequences."""

    sequences: tuple[SequencePlan, ...]
    moves: tuple[PageMove, ...] = ()
    """Page moves to make before anything else, in this order."""
    ended: tuple[int, ...] = ()
    """Requests whose page tables are dropped first. A request may end and return in the
    same plan."""
    stores: tuple[Store, ...] = ()
    """Copies out of the device, each after its own number of moves."""
    loads: tuple[Load, ...] = ()
    """Loads to begin after the moves. The step does not wait for them."""
    drops: tuple[bytes, ...] = ()
    """Identities of pictures whose pixels and embeddings are dropped first."""
    encodes: tuple[Picture, ...] = ()
    """Pictures to encode before anything is computed. The runner has their pixels."""
    encode_part: EncodePart | None = None
    """Part of a large picture to encode before the pictures of `encodes`."""

    @property
    def only_copies(self) -> bool:
        """Whether the plan only copies or encodes pictures, and computes no tokens. Such a plan
        has no outcome.
        """
        pictures = self.drops or self.encodes or self.encode_part
        return not self.sequences and bool(self.moves or self.stores or self.loads or pictures)

    @property
    def has_pictures(self) -> bool:
        """Whether some of the tokens stand for pictures."""
        return any(sequence.pictures for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        return sum(sequence.is_decode for sequence in self.sequences)

    @property
    def verifies(self) -> bool:
        """Whether a decode has more work than one token."""
        return any(sequence.is_decode and sequence.verifies for sequence in self.sequences)

    @property
    def sampled_numbers(self) -> list[int]:
        """Numbers of the requests that sample: once for the last token, and again for
        each draft."""
        numbers: list[int] = []
        for sequence in self.sequences:
            if sequence.samples:
                numbers += [sequence.number] * (1 + sequence.num_drafts)
        return numbers

    @property
    def written(self) -> dict[int, int]:
        """Maps each written slot to the number of tokens in its state after the step."""
        written: dict[int, int] = {}
        for sequence in self.sequences:
            if sequence.slot_out != ZERO_SLOT:
                written[sequence.slot_out] = sequence.state_end
            for export in sequence.exports:
                written[export.slot] = export.position
        return written

    @property
    def num_drafts(self) -> int:
        """Largest number of drafts in any sequence."""
        return max((sequence.num_drafts for sequence in self.sequences), default=0)


class SamplingPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Inputs to the choice of one request's next token, besides its logits and tokens."""

    number: int
    """The request's number."""
    params: SamplingParams
    seed: int
    """This sample's own seed (`SamplingParams.sample_seed`)."""
    num_prompt_tokens: int
    index: int
    """Index of the draw: the number of answer tokens before it."""
    num_ahead: int = 0
    """Number of those answer tokens that are sampled but not yet known to the planner."""
    num_drafts: int = 0
    """Number of drafts in the step. Drafts after this sample do not affect it."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that may not be chosen now: those that would end an answer shorter than min_tokens."""
    mask: bytes | None = None
    """Tokens that the output constraint allows now: bit i of byte b is token 8 b + i."""


class StepSampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """How a step samples: one row per sequence that samples, in order, plus one row per draft."""

    rows: tuple[SamplingPlan, ...]
    num_drafts: int = 0
    """Largest number of tokens that the model's head drafts after each sample."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The runner's report of one step."""

    tokens: dict[int, list[int]]
    """Request number -> the sampled tokens, for each sequence that samples."""
    written: dict[int, int]
    """Slot -> number of tokens that its state has consumed, for each written slot."""
    seconds: float = 0.0
    """Seconds since the outcome of the previous step, without idle time."""
