"""Allocations of running requests, and the states that they go through.

    tokens    |------------------------------|----|..........|
              0                              s    c          k
    s  state_length   tokens that the state in the slot has consumed
    c  committed      tokens that are final and have their KV
    k  kv_length      end of the KV that steps in flight write; after `planned` it is of drafts

Without drafts s == c between two steps. Pages are published up to c, and a state at s. To publish a
state at c, the tokens in between are folded into it first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from milepost.cache.placement import PromptFacts
from milepost.cache.plans import Arrival, Export, PageCopy
from milepost.cache.report import CacheReport
from milepost.cache.tree import Chain, Checkpoint, End, Node


class State(StrEnum):
    """Stages of an allocation's life."""

    __hash__ = str.__hash__  # faster: Enum.__hash__ is written in Python

    ADMITTED = "admitted"
    """It holds all that its first step reads: perhaps the state of a checkpoint, and a page to
    copy."""
    LOADING = "loading"
    """Its pages and its slot are being filled from outside."""
    READY = "ready"
    """Its own slot holds its state, and no step is in flight."""
    RUNNING = "running"
    """One step in flight writes its pages and slot, or two."""
    ENDED = "ended"
    """It holds nothing any more."""


NEXT_STATES = {
    State.ADMITTED: (State.RUNNING, State.LOADING, State.ENDED),
    State.LOADING: (State.READY, State.ADMITTED),
    State.READY: (State.RUNNING, State.ADMITTED, State.ENDED),
    State.RUNNING: (State.RUNNING, State.READY, State.ENDED),
    State.ENDED: (),
}
"""The states that may follow each state. A load ends in READY, or in ADMITTED if it failed. READY
goes back to ADMITTED if the loaded state becomes a checkpoint, which the first step then reads. An
allocation that is being loaded cannot end, since its pages are being written from outside."""


@dataclass(slots=True, kw_only=True, eq=False)
class Allocation:
    """Pages, slots and path that one running request holds, from `admit` to `release`.

    `page_table` is append-only. So is `window_table`, except that entries become HOLE.
    """

    chain: Chain
    report: CacheReport
    state: State
    page_table: list[int]
    path: list[Node]
    """Nodes of the full pages committed so far; their pages are pinned."""
    slot_in: int
    """The slot that the next step to be planned reads: the checkpoint's, the zero slot, or the
    request's own."""
    slot_out: int
    """The request's own slot, which every step writes."""
    state_length: int
    committed: int = field(init=False)
    planned: int = field(init=False)
    """Tokens that will be committed once the steps in flight have run, without drafts."""
    kv_length: int = field(init=False)
    write_from: int
    """KV of tokens before this position is in shared pages and must not be written."""
    source: Checkpoint | None
    """The checkpoint that the first step reads. Its slot and tail page are pinned until the first
    commit."""
    page_copy: PageCopy | None
    """A page to copy before the next step to be planned runs."""
    end: End
    """The end of the request's path, which decides what its checkpoints are worth."""
    deepest_state: int = field(init=False)
    """Position of the deepest checkpoint that the request resumed from or made."""
    facts: PromptFacts
    num_steps: int = 0
    """Number of steps in flight."""
    arrivals: tuple[Arrival, ...] = ()
    """Pages and slots that must be filled from outside before the request continues."""
    is_first: bool = True
    """Whether the request had never been admitted before."""
    path_pins: list[int] = field(default_factory=list)
    """Pages of `path` that are pinned besides those of the table: others published them first, and
    the request computed them a second time."""
    window_table: list[int] = field(default_factory=list)
    """Pages of the layers with a sliding window; HOLE for each page before the window."""
    window_copy: PageCopy | None = None
    """A window page to copy before the next step to be planned runs."""
    loading_windows: tuple[int, ...] = ()
    """Window pages that a state being loaded fills from outside."""
    slots_kept: list[int] = field(default_factory=list)
    """Slots set aside for the states at its branch points."""
    exports: list[Export] = field(default_factory=list)
    """Exports of the steps in flight that are not yet committed, by position."""

    def __post_init__(self) -> None:
        """Sets all positions to the one that the request resumes from."""
        self.committed = self.planned = self.kv_length = self.deepest_state = self.state_length

    def become(self, state: State) -> None:
        """Goes on to another state. Asserts that it is permitted."""
        assert state in NEXT_STATES[self.state], f"A5: {state}, but it was {self.state}"
        self.state = state

    def plan_step(self) -> None:
        """Records that one more step is in flight."""
        self.become(State.RUNNING)
        self.num_steps += 1

    def end_step(self) -> None:
        """Records that the first of the steps in flight is over."""
        assert self.num_steps, f"A5: no step is in flight, it was {self.state}"
        self.num_steps -= 1
        self.become(State.RUNNING if self.num_steps else State.READY)

    @property
    def is_in_flight(self) -> bool:
        return self.state is State.RUNNING

    @property
    def is_loading(self) -> bool:
        return self.state is State.LOADING

    @property
    def is_verifying(self) -> bool:
        """Whether a step in flight verifies drafts. Until it is over, it is unknown where the next
        step begins."""
        return self.kv_length > self.planned

    @property
    def num_unfolded(self) -> int:
        """Number of committed tokens that the next step to be planned folds into the
        state first."""
        return 0 if self.state is State.RUNNING else self.committed - self.state_length
