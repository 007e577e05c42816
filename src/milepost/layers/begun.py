"""Products of one row that are made in the launch of the norm ahead of them.

Legend: I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """A projection that has room for its output, of which the last matrix is to be multiplied."""

    owner: object
    """The projection."""
    weight: Tensor
    """The last matrix [O, I], raw."""
    target: Tensor
    """[1, O], its part of the output."""
    output: Tensor

    def ride_on(self, rows: Tensor) -> None:
        """Have the input `rows` bring it along once the target is filled. Views and copies of them
        do not have it."""
        rows.begun = self  # type: ignore[attr-defined]


def find(rows: Tensor, owner: object) -> Begun | None:
    """What the rows bring along for this projection."""
    begun = getattr(rows, "begun", None)
    return begun if isinstance(begun, Begun) and begun.owner is owner else None
