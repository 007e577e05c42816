"""Tracks the pages being computed right now, so that a request with the same prefix can wait for
them.

Waiting costs a step and saves the tokens that would be computed twice. The running prefill is asked
to keep its state where the two prompts part, and the request that waited resumes there.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cache.allocation import Allocation
from milepost.cache.placement import floor
from milepost.cache.tree import Match
from milepost.scheduler.request import Request

MIN_SAVED_TOKENS = 128
"""Fewest tokens that are worth waiting for: an extra step costs about as much as these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A prefix of `position` tokens, needed by others, that its owner is computing under
    `allocation`."""

    owner: Request
    allocation: Allocation
    position: int

    @property
    def is_pending(self) -> bool:
        """Whether those tokens are not computed yet."""
        allocation = self.allocation
        return self.owner.allocation is allocation and allocation.state_length < self.position

    @property
    def can_keep(self) -> bool:
        """Whether the owner can still be asked to keep the state at the position: no planned step
        passes it."""
        return self.allocation.planned < self.position


class PendingPrefixes:
    """Digests of the prompt pages being computed, each with the first request that computes it; and
    finished requests whose states a step in flight still advances. Digests are computed when first
    looked up, so they do not delay the step of a prompt that is alone."""

    __slots__ = ("_claims", "_grid", "_leaving", "_owners", "_unlisted")

    def __init__(self, grid: int) -> None:
        self._grid = grid
        self._owners: dict[bytes, Request] = {}
        self._claims: dict[Request, tuple[int, int]] = {}
        """Range of pages that each request has yet to commit."""
        self._unlisted: dict[Request, None] = {}
        """Requests with a claim whose digests have not been computed yet."""
        self._leaving: dict[Request, None] = {}

    def claim(self, request: Request) -> None:
        """Records that an admitted request computes the pages after its cached path."""
        assert request.allocation is not None
        self._claims[request] = len(request.allocation.path), request.chain.num_pages
        self._unlisted[request] = None

    def leave(self, request: Request) -> None:
        """Records that a finished request leaves when the step in flight is done."""
        self._leaving[request] = None

    def settle(self, request: Request) -> None:
        """Records that a request's pages were committed. The last page ends its claim."""
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
        """Drops the claim of a request that is done, preempted or gone."""
        self._leaving.pop(request, None)
        claim = self._claims.pop(request, None)
        if claim is not None:
            self._disown(request, *claim)
            self._unlisted.pop(request, None)

    def find(self, request: Request, match: Match) -> Shared | None:
        """Returns a prefix that is worth waiting for; None if there is none."""
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
    """Whether a request continues where a finished one is about to leave its state, judging by full
    pages."""
    allocation, chain = leaving.allocation, leaving.chain
    assert allocation is not None
    num_pages = allocation.planned // chain.page_size
    if allocation.planned > min(chain.shared_end, request.chain.last_resume):
        return False
    if not match.state_length < allocation.planned < request.num_tokens or not num_pages:
        return False
    last = num_pages - 1
    return request.chain.digests(num_pages)[last] == chain.digests(num_pages)[last]
