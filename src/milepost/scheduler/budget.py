"""The tokens of one step, and how they are shared out.

Each decode gets one, and a grid step is left for a prefill. Decodes that get none because of that
go first in the next step. `max_num_batched_tokens` is at least a grid step and at least
`max_num_seqs` (`milepost.config.check_budget`), so

- a decode gets its token in at least every other step,
- the first prefill, or the first waiting request that finds a seat and room, gets a grid step in
  at least every other step, and any other running prefill within MAX_IDLE_STEPS + 2 x max_num_seqs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milepost.cache.placement import floor
from milepost.scheduler.encoders import Encoders
from milepost.scheduler.request import Request

MAX_IDLE_STEPS = 16
"""Number of steps in which a running prefill may get no tokens because others are more urgent. Then
it gets a grid step before them."""


def max_num_exports(max_num_seqs: int, max_num_batched_tokens: int, grid: int) -> int:
    """Returns the largest number of states that one step keeps: one for each sequence, and one for
    each grid position that it passes. Prompts with many marks in a page could ask for more, and
    each state off the grid costs a chunk's memory."""
    return max_num_seqs + max_num_batched_tokens // grid


class Budget:
    """The tokens of the step being planned: how many are given out, and how many are left."""

    __slots__ = ("_encoders", "given", "grid", "left", "num_drafts")

    def __init__(self, num_tokens: int, grid: int, encoders: Encoders) -> None:
        self.left = num_tokens
        self.grid = grid
        self._encoders = encoders
        self.given: dict[Request, int] = {}
        """Number of tokens that each request gets."""
        self.num_drafts: dict[Request, int] = {}
        """Number of drafts of each request that are verified in addition."""

    @property
    def has_prefill(self) -> bool:
        return any(num_tokens > 1 for num_tokens in self.given.values())

    def can_begin(self, num_left: int) -> bool:
        """Whether there are tokens for a request that has `num_left` to compute: all of them, or a
        grid step. With fewer it would hold memory and compute next to nothing."""
        return self.left >= min(self.grid, num_left)

    def give(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            self.given[request] = self.given.get(request, 0) + num_tokens
            self.left -= num_tokens

    def give_decodes(self, decodes: Sequence[Request]) -> None:
        """Gives a token to each decode that had none in the last step, then to as many others as
        leave a grid step for a prefill; to all if no grid step can be left anyway."""
        had_none = [request for request in decodes if request.num_idle_steps]
        self.give_one_each(had_none)
        others = [request for request in decodes if not request.num_idle_steps]
        self.give_one_each(others if self.left < self.grid else others[: self.left - self.grid])

    def give_one_each(self, decodes: Iterable[Request]) -> None:
        """Gives a token to each request that has none yet, while tokens are left."""
        for request in decodes:
            if self.left and request not in self.given:
                self.give(request, 1)

    def give_chunk(self, request: Request, most: int | None = None) -> None:
        """Gives a request all tokens that it has left to compute, or the largest number ending on
        the grid. `most` limits them, and so do pictures that the step cannot encode, possibly to
        none."""
        most = self.left if most is None else min(most, self.left)
        num_left = request.num_left - self.given.get(request, 0)
        assert request.allocation is not None
        start = request.allocation.planned + self.given.get(request, 0)
        if request.chain.pictures and num_left:
            end = start + min(num_left, most)
            most = self._encoders.reach(request.chain.pictures, start, end, self.left) - start
            self.charge_encoders()
            most = min(most, self.left)
        if num_left > most:
            num_left = max(floor(start + most, self.grid) - start, 0)
        self.give(request, num_left)

    def charge_encoders(self) -> None:
        """Takes the tokens that the step's work on pictures stands for; a grid step is left."""
        self.left = max(self.left - self._encoders.charge(), min(self.left, self.grid))

    def give_drafts(self, request: Request, num_drafts: int) -> None:
        """Gives a request tokens for drafts; the caller has checked that they are left."""
        self.num_drafts[request] = num_drafts
        self.left -= num_drafts

    def give_starved(self, prefills: Iterable[Request]) -> None:
        """Gives a grid step to prefills that have had nothing for too long."""
        starved = [r for r in prefills if r.num_idle_steps >= MAX_IDLE_STEPS]
        for request in sorted(starved, key=lambda r: -r.num_idle_steps):
            self.give_chunk(request, self.grid)

    def note_idle(self, requests: Iterable[Request]) -> None:
        """Counts the steps in which running requests get no tokens."""
        for request in requests:
            request.num_idle_steps = 0 if request in self.given else request.num_idle_steps + 1
