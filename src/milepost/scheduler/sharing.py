"""Notes the pages being computed right now, so that a request with the same prefix can wait for
them.

Waiting costs a step and saves the tokens that would be computed twice. The running prefill is asked
to keep its state where the paths part, so the request that waited resumes there.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cache.allocation import Allocation
from milepost.cache.placement import floor
from milepost.cache.tree import Match
from milepost.scheduler.request import Request

MIN_SAVED_TOKENS = 128
"""Fewer are computed twice rather than waited for: a step of its own costs about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The owner is about to compute, under `allocation`, the tokens up to `position`, which others
    need.
    """

    owner: Request
    allocation: Allocation
    position: int

    @property
    def is_pending(self) -> bool:
        """Whether those tokens are still to come."""
        allocation = self.allocation
        return self.owner.allocation is allocation and allocation.state_length < self.position

    @property
    def can_keep(self) -> bool:
        """Whether the state at the position can still be asked for: no step planned passes it."""
        return self.allocation.planned < self.position


class PendingPrefixes:
    """Prompt pages being computed, by digest, with the first request that computes each; and
    requests that are over, but for a step in flight that takes their state further.

    Digests are made when somebody looks for them: a device that waits for the step of a prompt that
    is alone does not wait for those.
    """

    __slots__ = ("_claims", "_grid", "_leaving", "_owners", "_unlisted")

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._owners: dict[bytes, Request] = {}
        self._claims: dict[Request, tuple[int, int]] = {}
        """The first and the end of the pages that each has yet to commit."""
        self._unlisted: dict[Request, None] = {}
        """Those with a claim whose digests nobody has looked for yet."""
        self._leaving: dict[Request, None] = {}

    def claim(self, request: Request) -> None:
        """Note that an admitted request computes the pages after its cached path."""
        assert request.allocation is not None
        self._claims[request] = len(request.allocation.path), request.chain.num_pages
        self._unlisted[request] = None

    def leave(self, request: Request) -> None:
        """Note that a request is over, and leaves when the step in flight is done."""
        self._leaving[request] = None

    def settle(self, request: Request) -> None:
        """Note that pages were committed; the last one ends the claim."""
        claim = self._claims.get(request)
        if claim is None or request.allocation is None:
            return
        first, end = claim
        done = min(len(request.allocation.path), end)
        self._disown(request, first, done)
        self._claims[request] = done, end
        if done >= end:
            del self._claims[request]
            self._unlisted.pop(request, None)

    def drop(self, request: Request) -> None:
        """Forget what a request claimed: it is done, preempted or gone."""
        self._leaving.pop(request, None)
        claim = self._claims.pop(request, None)
        if claim is not None:
            self._disown(request, *claim)
            self._unlisted.pop(request, None)

    def find(self, request: Request, match: Match) -> Shared | None:
        """The prefix that is worth waiting for, if there is one."""
        for leaving in self._leaving:
            if leaving.allocation is not None and _continues(request, leaving, match):
                return Shared(
                    owner=leaving,
                    allocation=leaving.allocation,
                    position=leaving.allocation.planned,
                )
        self._list_claims()
        if not self._owners:
            return None
        digests = request.chain.full_digests()
        depth = match.path.num_pages
        while depth < len(digests) and digests[depth] in self._owners:
            depth += 1
        position = floor(
            min(depth * request.chain.page_size, request.chain.last_resume), self._grid
        )
        if position - match.state_length < MIN_SAVED_TOKENS or position <= match.kv_length:
            return None
        owner = self._owners[digests[(position - 1) // request.chain.page_size]]
        if owner.allocation is None or owner.allocation.committed >= position:
            return None
        return Shared(owner=owner, allocation=owner.allocation, position=position)

    def _list_claims(self) -> None:
        for request in self._unlisted:
            first, end = self._claims[request]
            for digest in request.chain.digests(end)[first:end]:
                self._owners.setdefault(digest, request)
        self._unlisted.clear()

    def _disown(self, request: Request, first: int, end: int) -> None:
        if request in self._unlisted:
            return
        digests = request.chain.digests(end)
        for digest in digests[first:end]:
            if self._owners.get(digest) is request:
                del self._owners[digest]


def _continues(request: Request, leaving: Request, match: Match) -> bool:
    """Whether a request goes on where one ended that is about to leave its state there; as far as
    full pages tell.
    """
    allocation, chain = leaving.allocation, leaving.chain
    assert allocation is not None
    num_pages = allocation.planned // chain.page_size
    if allocation.planned > min(chain.shared_end, request.chain.last_resume):
        return False
    if not match.state_length < allocation.planned < request.num_tokens or not num_pages:
        return False
    last = num_pages - 1
    return request.chain.digests(num_pages)[last] == chain.digests(num_pages)[last]
