"""Chooses a replica for each request."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from milepost.scheduler.routing import cost


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as the router sees it; empty if the prompt is unknown."""

    number: str = ""
    keys: tuple[bytes, ...] = ()
    """Keys of the prompt's full pages."""
    num_tokens: int = 0
    page_size: int = 0

    def num_lacking(self, pages: Any) -> int:
        """Returns the number of tokens to compute where these pages are usable."""
        return max(self.num_tokens - depth(self.keys, pages) * self.page_size, 1)


@dataclass(frozen=True, slots=True)
class _SentTo:
    """Destination of a request, and the tokens it lacks there."""

    replica_id: ReplicaID
    number: str
    num_lacking: int
    future: asyncio.Future[Any]
    """A future that is cancelled if the request is given up before it was sent."""


class CostRouter(RequestRouter):
    """Prefers the replica where a request costs least, then the least busy, then the one with the
    fewest cached pages.

    A prompt's tokens count as waiting from when it is sent until its replica reports that the
    answer has begun, or until the answer is over: an answer that is not streamed begins with its
    end.
    """

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ARG002
        self._choices: dict[str, _SentTo] = {}
        """Maps Ray's request id to the choice, until the request is over."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        asked, waiting = _asked(pending_request), self._waiting(candidate_replicas)
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))

        def rank(replica: RunningReplica) -> tuple[int, int, int]:
            pages = replica.routing_stats.get("pages", ())
            num_requests = self._replica_queue_len_cache.get(replica.replica_id) or 0
            num_waiting = waiting.get(replica.replica_id, 0)
            return cost(asked.num_lacking(pages), num_waiting), num_requests, len(pages)

        chosen = sorted(shuffled, key=rank)
        if pending_request is not None and chosen:
            self._count_waiting(pending_request, chosen[0])
        return [[replica] for replica in chosen]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002
    ) -> None:
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._count_waiting(pending_request, replica)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        choice = self._choices.get(internal_request_id)
        if choice is not None and choice.replica_id == replica_id:
            del self._choices[internal_request_id]

    def _count_waiting(self, request: PendingRequest, replica: RunningReplica) -> None:
        """Counts a request's tokens as waiting at a replica, since other requests are routed before
        it has been sent.
        """
        asked = _asked(request)
        if asked.number:
            lacking = asked.num_lacking(replica.routing_stats.get("pages", ()))
            choice = _SentTo(replica.replica_id, asked.number, lacking, request.future)
            self._choices[request.metadata.internal_request_id] = choice

    def _waiting(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Returns the number of prompt tokens that wait at each replica."""
        begun = {each.replica_id: each.routing_stats.get("begun", ()) for each in replicas}
        waiting = dict.fromkeys(begun, 0)
        for id_, choice in list(self._choices.items()):
            if choice.future.cancelled():
                del self._choices[id_]
            elif choice.number not in begun.get(choice.replica_id, (choice.number,)):
                waiting[choice.replica_id] += choice.num_lacking
        return waiting


def _asked(pending_request: PendingRequest | None) -> Wanted:
    if pending_request is None:
        return Wanted()
    return pending_request.kwargs.get("asked") or Wanted()


def depth(keys: Any, pages: Any) -> int:
    """Returns how many of a prompt's first pages are there."""
    for number, key in enumerate(keys):
        if key not in pages:
            return number
    return len(keys)
