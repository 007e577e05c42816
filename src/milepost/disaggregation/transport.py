"""How bytes get from one engine's memory to another's: what a transport can do."""

from __future__ import annotations

from typing import Any, Protocol

from milepost.disaggregation.memory import RegisteredMemory
from milepost.disaggregation.messages import Layout


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
        """Whether it has come. Raises TransferError when it does not come; then, as when it has
        come, nobody writes any more.
        """
        ...

    def go_on(self) -> None:
        """What this engine has to do for others to read from it; called while they do."""
        ...

    def give_up(self, transfer: Any) -> bool:
        """End one that takes too long; False while somebody may still write."""
        ...

    def close(self) -> None: ...


class TransferError(Exception):
    """What was to be read does not come; nobody writes any more."""


def make(name: str, memory: RegisteredMemory, engine_id: str, backends: list[str]) -> Transport:
    """The transport of this name. Raises ConfigError."""
    if name == "nixl":
        from milepost.disaggregation.nixl import Nixl

        return Nixl(memory, engine_id, backends)
    from milepost.disaggregation.sockets import Sockets

    return Sockets(memory)
