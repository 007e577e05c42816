"""Leases of other engines that requests here still need: heartbeats keep them, a release ends them.

Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from milepost.disaggregation.messages import Beat, Release
from milepost.disaggregation.params import Remote
from milepost.disaggregation.peers import Peers
from milepost.disaggregation.transport import TransferError

BEATS = 6
"""Heartbeats in the time of a lease."""


class Borrowed:
    """Of leases that are valid for `lease_s` from each heartbeat."""

    def __init__(self, peers: Peers, lease_s: float, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._beat_s = lease_s / BEATS
        self._clock = clock
        self._held: dict[Remote, None] = {}
        self._beat_at = 0.0

    @property
    def next_beat(self) -> float | None:
        return self._beat_at if self._held else None

    def hold(self, remote: Remote) -> None:
        """It is wanted."""
        self._held[remote] = None

    def let_go(self, remote: Remote) -> None:
        """No heartbeat of this engine keeps it any more."""
        self._held.pop(remote, None)

    def release(self, remote: Remote) -> None:
        """It is not wanted any more, and the other engine is told; one that was asked before and is
        gone is not asked again."""
        was_held = remote in self._held
        self.let_go(remote)
        with suppress(TransferError):
            peer = (self._peers.find if was_held else self._peers.at)(*remote.place)
            if peer is not None:
                peer.ask(Release(remote.lease), lambda _: None)

    def beat(self) -> None:
        """Tell the others, if it is time."""
        now = self._clock()
        if not self._held or now < self._beat_at:
            return
        self._beat_at = now + self._beat_s
        by_place: dict[tuple[str, int], list[str]] = {}
        for remote in self._held:
            by_place.setdefault(remote.place, []).append(remote.lease)
        for place, leases in by_place.items():
            peer = self._peers.find(*place)
            if peer is not None:
                peer.say(Beat(leases))
