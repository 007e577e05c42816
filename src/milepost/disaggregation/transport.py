"""The interface of transports, which move bytes from one engine's memory to another's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from milepost.disaggregation.messages import Layout
from milepost.disaggregation.registered_pools import RegisteredMemory
from milepost.kv_config import KVTransferConfig

LOOK_S = (50e-6, 1e-3)
"""Shortest and longest time between two polls of transfers. Transfers that have taken long are
polled less often.
"""
LOOKS = 16
"""Divisor of a transfer's age that gives the time between two polls."""


class Transport:
    """Reads pieces of other engines' memory into this one's. Used by one thread. By
    default, methods without a result do nothing."""

    name: str

    def enter(self) -> None:
        """Prepares the thread that uses the transport; called first, in that thread."""

    def metadata(self) -> bytes:
        """Returns what other engines need to read from this one."""
        raise NotImplementedError

    def add_peer(self, metadata: bytes, layout: Layout) -> Any:
        """Returns a handle of another engine for `begin`. Raises TransferError."""
        raise NotImplementedError

    def remove_peer(self, peer: Any) -> None:
        """Drops a handle."""

    def begin(self, peer: Any, lease: str, local: list[int], remote: list[int]) -> Any:
        """Begins to read under a lease: the n-th remote piece into the n-th local one. Raises
        TransferError.
        """
        raise NotImplementedError

    def is_done(self, transfer: Any) -> bool:
        """Whether every byte has come, or the transfer was cancelled and nothing writes any more.
        Raises TransferError if it failed; nothing writes then either.
        """
        raise NotImplementedError

    def make_progress(self) -> None:
        """Does this engine's share of the reads that other engines make here; called while they
        last."""

    def stop_progress(self) -> None:
        """Stops making progress, since the last reader of this engine has finished."""

    def cancel(self, transfer: Any) -> bool:
        """Ends a transfer that takes too long. Returns False while something may still write; the
        transfer is then polled, and cancelled again.
        """
        raise NotImplementedError

    def lend(
        self, lease: str, pages: tuple[int, ...], slot: int | None, windows: tuple[int, ...] = ()
    ) -> None:
        """Lets others read these pages, this slot and these pages of windows under a lease. May be
        called from any thread, like `end_loan`.
        """

    def end_loan(self, lease: str) -> None:
        """Ends a loan: it can no longer be read, as far as the transport can prevent that."""

    def close(self) -> None:
        """Ends the transport."""


class TransferError(Exception):
    """A read failed, and nothing writes any more."""


def make(config: KVTransferConfig, memory: RegisteredMemory, name: str) -> Transport:
    """Returns the configured transport; `name` is unique among engines. Raises ConfigError."""
    if config.exchange.transport == "nixl":
        from milepost.disaggregation.nixl import Nixl

        return Nixl(memory, name, list(config.exchange.backends))
    from milepost.disaggregation.sockets import Sockets

    return Sockets(memory, config)


def look_s(now: float, begun_at: Iterable[float]) -> float | None:
    """Returns the time until the next poll, given when transfers under way began; None if there are
    none.
    """
    youngest = max(begun_at, default=None)
    if youngest is None:
        return None
    least, most = LOOK_S
    return min(max((now - youngest) / LOOKS, least), most)
