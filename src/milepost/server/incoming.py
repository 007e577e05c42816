"""What the connection tells the gate about the request that it is receiving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from milepost.server.errors import HttpError


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming:
    """One request, as far as it has arrived."""

    is_whole: bool = False
    """Whether its body has arrived to the end."""
    problem: HttpError | None = None
    """Why the rest of its body cannot be read."""
    abort: Callable[[], None] = lambda: None
    """Drops the connection at once."""
