"""Reports of the thread that talks to other engines to the engine's own thread."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.disaggregation.messages import Find
from milepost.kv_transfer_params import Remote


@dataclass(frozen=True, slots=True)
class Pulled:
    """End of a pull: everything has arrived, or there was a problem."""

    number: int
    problem: str
    num_bytes: int
    seconds: float
    """Time from the request until the data was certain."""
    read_s: float
    """Part of `seconds` from the first byte to the last."""


@dataclass(frozen=True, slots=True)
class Read:
    """Another engine has read a loan, whose last full page is `page`. It can be asked for the
    continuation at `host` and `port`.
    """

    page: bytes
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoteMatch:
    """Answer of another engine to a question about tokens; `remote` is None if it has nothing of
    use.
    """

    number: int
    remote: Remote | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of another engine about tokens; `Links.tell` answers it."""

    who: bytes
    number: bytes
    find: Find


Outcome = Pulled | Read | RemoteMatch | Asked
