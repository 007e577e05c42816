"""What the thread that talks to other engines reports to the engine's own."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.disaggregation.messages import Find
from milepost.disaggregation.params import Remote


@dataclass(frozen=True, slots=True)
class Pulled:
    """What has come of a pull: all of it, or a problem."""

    number: int
    problem: str
    num_bytes: int
    seconds: float
    """From the request for it until it was certain."""
    read_s: float
    """Of them, from the first byte to the last."""


@dataclass(frozen=True, slots=True)
class Read:
    """Another engine has what was lent up to that page and behind, and is asked there."""

    page: bytes
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RemoteMatch:
    """What another engine has of the tokens that were asked for; None for nothing of use."""

    number: int
    remote: Remote | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Another engine asks what there is of these tokens; to be answered with `Links.tell`."""

    who: bytes
    number: bytes
    find: Find


Outcome = Pulled | Read | RemoteMatch | Asked
