"""Free places of a tier, by what they hold: pages and tails, or states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from milepost.cache.plans import What

BudgetName = Literal["pages", "states"]


def budget_of(what: What) -> BudgetName:
    """Returns the budget that an item counts towards."""
    return "states" if what == "state" else "pages"


@dataclass(slots=True, kw_only=True)
class FreePlaces:
    """Free places of one kind."""

    capacity: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.capacity - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.capacity - len(self.free)
