"""Allocations of running requests, and the states that they go through.

    tokens    |------------------------------|----|..........|
              0                              s    c          k
    s  state_length   what the slot has folded in
    c  committed      ids that are final, with their KV
    k  kv_length      KV that the steps in flight write; after `planned` it is drafts'

Without drafts s == c between two steps. Pages are published up to c, a state at s: to get one at c,
the tokens between are folded in first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import PromptFacts
from milepost.cache.plans import Arrival, Export, PageCopy
from milepost.cache.report import CacheReport
from milepost.cache.tree import Chain, Checkpoint, End, Node


class State(StrEnum):
    """Where an allocation stands."""

    __hash__ = str.__hash__  # an enumeration's own runs in Python

    ADMITTED = "admitted"
    """Holds all that its first step reads: others' state, perhaps, and a page to copy."""
    LOADING = "loading"
    """Its pages and its slot are being filled from outside."""
    READY = "ready"
    """Its own slot holds its state."""
    RUNNING = "running"
    """A step in flight writes what it holds; or two."""
    ENDED = "ended"
    """Holds nothing."""


class Transition(StrEnum):
    """Events of an allocation's life; `TRANSITIONS` says when each may happen."""

    __hash__ = str.__hash__

    PLANNED = "planned"
    COMMITTED = "committed"
    """A step was committed, and another one is in flight."""
    SETTLED = "settled"
    """The last step in flight was committed."""
    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    KEPT = "kept"
    """The state that was loaded became a checkpoint, which its first step reads."""
    RELEASED = "released"


TRANSITIONS = {
    (State.ADMITTED, Transition.PLANNED): State.RUNNING,
    (State.READY, Transition.PLANNED): State.RUNNING,
    (State.RUNNING, Transition.PLANNED): State.RUNNING,
    (State.RUNNING, Transition.COMMITTED): State.RUNNING,
    (State.RUNNING, Transition.SETTLED): State.READY,
    (State.ADMITTED, Transition.LOAD): State.LOADING,
    (State.LOADING, Transition.LOADED): State.READY,
    (State.LOADING, Transition.LOAD_FAILED): State.ADMITTED,
    (State.READY, Transition.KEPT): State.ADMITTED,
    (State.ADMITTED, Transition.RELEASED): State.ENDED,
    (State.READY, Transition.RELEASED): State.ENDED,
    (State.RUNNING, Transition.RELEASED): State.ENDED,
}
"""All that may happen. What is being loaded is not released: somebody writes into it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Allocation:
    """Pages, slots and path that one running request holds, from `admit` to `release`.

    `page_table` is append-only; so is `window_table`, but for what becomes a HOLE.
    """

    chain: Chain
    report: CacheReport
    state: State
    page_table: list[int]
    path: list[Node]
    """Nodes of the full pages committed so far; the path's pages are pinned."""
    slot_in: int
    """The slot that the next step to be planned reads: the checkpoint's, the zero slot, or its own.
    """
    slot_out: int
    """Its own, which every step writes."""
    state_length: int
    committed: int = field(init=False)
    planned: int = field(init=False)
    """Tokens that are committed once the steps in flight have run, drafts not counted."""
    kv_length: int = field(init=False)
    write_from: int
    """KV of tokens before this is in shared pages and must not be written."""
    source: Checkpoint | None
    """The checkpoint that is read, pinned until the first commit."""
    page_copy: PageCopy | None
    """To be done before the next step to be planned."""
    pinned_tail: tuple[int, ...]
    """The tail page of the checkpoint that is read, pinned until the first commit."""
    end: End
    """Where the path ends, for the worth of its checkpoints."""
    deepest_state: int = field(init=False)
    """Position of the deepest checkpoint that the request resumed from or made."""
    facts: PromptFacts
    num_steps: int = 0
    """In flight."""
    arrivals: tuple[Arrival, ...] = ()
    """Pages and slots to be filled from outside before the request goes on."""
    is_first: bool = True
    """Whether its request was never admitted before."""
    path_pins: list[int] = field(default_factory=list)
    """Pages of the path that are pinned besides the table's: the request computed them a second
    time.
    """
    window_table: list[int] = field(default_factory=list)
    """Pages of layers with a sliding window, HOLEs for those before it."""
    window_copy: PageCopy | None = None
    """Copies one window page to another, before the next step to be planned."""
    loading_windows: tuple[int, ...] = ()
    """Window pages of the loaded state, which are filled from outside."""
    pinned_window: tuple[int, ...] = ()
    """Window page that `window_copy` reads, pinned until the first commit."""
    exports: list[Export] = field(default_factory=list)
    """Taken for the steps in flight, not yet committed; by position."""

    def __post_init__(self) -> None:
        """It begins where it resumes."""
        self.committed = self.planned = self.kv_length = self.deepest_state = self.state_length

    def happens(self, transition: Transition) -> None:
        """Go over to the next state."""
        following = TRANSITIONS.get((self.state, transition))
        assert following is not None, f"A5: {transition} of an allocation that is {self.state}"
        self.state = following

    @property
    def is_in_flight(self) -> bool:
        return self.state is State.RUNNING

    @property
    def has_taken_over(self) -> bool:
        """Whether what its first step, not yet planned, reads lies in the slot that it writes."""
        return self.slot_in == self.slot_out != ZERO_SLOT

    @property
    def is_loading(self) -> bool:
        return self.state is State.LOADING

    @property
    def is_verifying(self) -> bool:
        """Whether a step in flight verifies drafts: nobody knows yet where the next one begins."""
        return self.kv_length > self.planned

    @property
    def num_unfolded(self) -> int:
        """Committed tokens for the next step to be planned to fold into the state first."""
        return 0 if self.state is State.RUNNING else self.committed - self.state_length
