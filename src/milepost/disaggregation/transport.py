"""The interface of transports, which move bytes from one engine's memory to another's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from milepost.disaggregation.memory import RegisteredMemory
from milepost.disaggregation.messages import Layout
from milepost.kv_transfer_config import KVTransferConfig

LOOK_S = (50e-6, 1e-3)
"""Between two polls of transfers, least and most: those that have taken long are polled less
often."""
LOOKS = 16
"""The time between two polls is this part of what a transfer has taken so far."""


class Transport(Protocol):
    """Reads pieces of other engines' memory into this one's. Used by one thread."""

    name: str

    def enter(self) -> None:
        """Called first, by that thread."""
        ...

    def metadata(self) -> bytes:
        """What others need to read from here."""
        ...

    def add_peer(self, metadata: bytes, layout: Layout) -> Any:
        """Another engine, as `begin` takes it. Raises TransferError."""
        ...

    def remove_peer(self, peer: Any) -> None: ...

    def begin(self, peer: Any, lease: str, local: list[int], remote: list[int]) -> Any:
        """Begin to read under a lease: the n-th of these pieces there into the n-th here. Raises
        TransferError."""
        ...

    def is_done(self, transfer: Any) -> bool:
        """Whether every byte has come, or it was cancelled and nobody writes any more. Raises
        TransferError if it failed; then nobody writes either.
        """
        ...

    def make_progress(self) -> None:
        """Do what this engine must for others to read from it; called while they do."""
        ...

    def stop_progress(self) -> None:
        """Nobody reads from this engine any more."""
        ...

    def cancel(self, transfer: Any) -> bool:
        """End a transfer that takes too long; False while somebody may still write: then it is
        polled, and cancelled again."""
        ...

    def lend(self, lease: str, pages: tuple[int, ...], slot: int | None) -> None:
        """Let others read these under a lease. May be called from any thread, as `end_loan`."""
        ...

    def end_loan(self, lease: str) -> None:
        """Nobody reads under it any more, as far as that can be kept from them."""
        ...

    def close(self) -> None: ...


class TransferError(Exception):
    """A read failed; nobody writes any more."""


def make(config: KVTransferConfig, memory: RegisteredMemory, name: str) -> Transport:
    """The configured transport; `name` is unique among engines. Raises ConfigError."""
    if config.transport == "nixl":
        from milepost.disaggregation.nixl import Nixl

        return Nixl(memory, name, config.backends)
    from milepost.disaggregation.sockets import Sockets

    return Sockets(memory, config)


def look_s(now: float, begun_at: Iterable[float]) -> float | None:
    """Until the next look at what is under way since then; None if nothing is."""
    youngest = max(begun_at, default=None)
    if youngest is None:
        return None
    least, most = LOOK_S
    return min(max((now - youngest) / LOOKS, least), most)
