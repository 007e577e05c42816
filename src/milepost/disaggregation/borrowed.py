"""Leases of other engines that requests here still need. Heartbeats keep them, and a release ends
them.

Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from milepost.disaggregation.messages import Beat, Release
from milepost.disaggregation.peers import Peers
from milepost.disaggregation.transport import TransferError
from milepost.kv_transfer_params import Remote

BEATS = 6
"""Heartbeats per length of a lease."""


class Borrowed:
    """Keeps leases that are valid for `lease_s` from each heartbeat."""

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
        """Starts to keep a lease."""
        self._held[remote] = None

    def let_go(self, remote: Remote) -> None:
        """Stops the heartbeats for a lease."""
        self._held.pop(remote, None)

    def release(self, remote: Remote) -> None:
        """Ends a lease and tells the other engine. An engine that was asked about it before and is
        gone is not asked again.
        """
        was_held = remote in self._held
        self.let_go(remote)
        with suppress(TransferError):
            peer = (self._peers.find if was_held else self._peers.at)(*remote.place)
            if peer is not None:
                peer.ask(Release(remote.lease), lambda _: None)

    def beat(self) -> None:
        """Sends heartbeats if they are due."""
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
