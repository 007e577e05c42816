"""The interface of transports, which move bytes from one engine's memory to another's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from milepost.disaggregation.memory import RegisteredMemory
from milepost.disaggregation.messages import Layout
from milepost.kv_transfer_config import KVTransferConfig

LOOK_S = (50e-6, 1e-3)
"""Between two looks at what is being read, least and most: what has taken long is looked at less
often."""
LOOKS = 16
"""The time between two looks is so small a part of what a transfer has taken so far."""


class Transport(Protocol):
    """Reads pieces of other engines' memory into this one's. Used by one thread."""

    name: str

    def enter(self) -> None:
        """That thread begins."""
        ...

    def metadata(self) -> bytes:
        """What others need to read from here."""
        ...

    def add_peer(self, metadata: bytes, layout: Layout) -> Any:
        """Another engine, as `begin` takes it. Raises TransferError."""
        ...

    def remove_peer(self, peer: Any) -> None: ...

    def begin(self, peer: Any, local: list[int], remote: list[int]) -> Any:
        """Begin to read: the n-th of these pieces there into the n-th here. Raises
        TransferError."""
        ...

    def is_done(self, transfer: Any) -> bool:
        """Whether it has come, or was given up and nobody writes any more. Raises TransferError
        when it does not come; then nobody does either.
        """
        ...

    def go_on(self) -> None:
        """What this engine has to do for others to read from it; called while they do."""
        ...

    def rest(self) -> None:
        """Nobody reads from it any more."""
        ...

    def give_up(self, transfer: Any) -> bool:
        """End one that takes too long; False while somebody may still write: then it is looked at
        again, and given up again."""
        ...

    def close(self) -> None: ...


class TransferError(Exception):
    """What was to be read does not come; nobody writes any more."""


def make(config: KVTransferConfig, memory: RegisteredMemory, name: str) -> Transport:
    """The transport that is asked for, of whom nobody else has that name. Raises ConfigError."""
    if config.transport == "nixl":
        from milepost.disaggregation.nixl import Nixl

        return Nixl(memory, name, config.backends)
    from milepost.disaggregation.sockets import Sockets

    return Sockets(memory, config.kv_ip)


def look_s(now: float, begun_at: Iterable[float]) -> float | None:
    """Until the next look at what is under way since then; None if nothing is."""
    youngest = max(begun_at, default=None)
    if youngest is None:
        return None
    least, most = LOOK_S
    return min(max((now - youngest) / LOOKS, least), most)
