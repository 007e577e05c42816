"""Moves cached pages of a unified pool together, so that a unit becomes free for a slot.

Without it, memory that is free in pieces is of no use to a slot, and states would have to go though
there is room for them. Pages that a running request holds stay where they are.
"""

from __future__ import annotations

from milepost.cache.memory import UnifiedPool
from milepost.cache.plans import PageMove
from milepost.cache.tree import Tree


class Mover:
    """Changes the tree and the pages of `unified`; `pending` are the copies that are yet to be
    made, in this order, before anything else is written.
    """

    def __init__(self, tree: Tree, unified: UnifiedPool) -> None:
        self._tree = tree
        self._unified = unified
        self.pending: list[PageMove] = []

    def clear_unit(self) -> bool:
        """Move the pages of the unit that holds fewest of them, of those without any that a request
        holds; False if there is none. As many pages as make a unit are free in others.
        """
        unit = self._unified.unit_to_clear()
        if unit is None:
            return False
        for source, target in self._unified.make_way(unit):
            self._tree.move(source, target)
            self.pending.append(PageMove(source=source, target=target))
        return True

    def take(self) -> tuple[PageMove, ...]:
        """The copies to be made, which are the caller's to see to from now on."""
        moves, self.pending = tuple(self.pending), []
        return moves
