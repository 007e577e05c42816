"""The tree for people to look at: chains of single children are folded into runs of pages.

Read-only. A tree may have 100,000 pages and no step should wait for that, so a survey is made in
slices between which the cache may change. A page's place never changes, so what a survey returns is
a tree in which nothing is counted twice; some of it may be a few steps older than the rest.
It says how many and where, never which: no token, salt or digest is exported.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass

from milepost.cache.tree import Checkpoint, Node, Tree

MAX_RUNS = 2000
"""Largest number of runs in a survey: the heaviest and those asked for. The others are summed up at
their parents."""
MAX_CHECKPOINTS = 256
"""Number of checkpoints that are listed per run, the deepest first; the others are only counted."""
VISITS = 4096
"""Number of nodes that a slice visits: about a millisecond's work."""

_RUN_VISITS = 8
"""Cost of a run, in nodes passed."""
_NONE = -1
_ASKED_FOR = 2**40
"""Weight, in pages, of a run that was asked for, so that it is always among the largest."""


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint: after how many tokens, why it was made, and how often it was resumed from."""

    position: int
    kind: str
    num_uses: int


@dataclass(slots=True, kw_only=True)
class PageRun:
    """Consecutive pages, up to where paths part or end; a root has none."""

    id: int
    """The first page's id, the same from one survey to the next while nothing is split or moved; a
    root's is negative."""
    parent: int | None
    """Index of the run that it continues; None for a root."""
    first: int
    """Number of pages of its path before it."""
    num_pages: int
    num_strays: int
    """Number of pages at the run's end that no checkpoint can reach."""
    checkpoints: list[CheckpointView]
    """At most `MAX_CHECKPOINTS` of its checkpoints, the deepest first."""
    num_checkpoints: int
    num_others: int = 0
    """Number of runs below it that are not listed."""
    other_pages: int = 0
    other_checkpoints: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A survey of the whole tree. A run may be listed before the run that it continues."""

    runs: list[PageRun]
    places: dict[Node, int]
    """Maps each resident node that was asked for to the index of its run, or of the nearest listed
    run above."""
    num_runs: int
    """Number of runs, with those that are not listed."""


Slices = Generator[None, None, None]


def survey(
    tree: Tree, wanted: Collection[Node] = (), *, max_runs: int = MAX_RUNS, visits: int = VISITS
) -> Generator[None, None, View]:
    """Surveys the tree. Yields after every `visits` nodes or runs, and returns the view.

    The nodes in `wanted` are located, and their runs listed before others.
    """
    surveyor = _Surveyor(tree, dict.fromkeys(wanted), visits)
    yield from surveyor.find_ends()
    yield from surveyor.walk()
    yield from surveyor.add_up()
    yield from surveyor.choose(max_runs)
    return (yield from surveyor.view())


class _Surveyor:
    """A survey in progress. Runs are numbers, and their properties are lists of numbers: 100,000
    objects would start the garbage collector, which pauses the engine.
    """

    def __init__(self, tree: Tree, wanted: dict[Node, None], visits: int) -> None:
        self._tree = tree
        self._wanted = wanted
        self._visits = visits
        self._num_runs = -(-visits // _RUN_VISITS)
        """Number of runs that a slice handles."""
        self._number: dict[Node, int] = {}
        self._above: list[int] = []
        self._id: list[int] = []
        self._first: list[int] = []
        self._num_pages: list[int] = []
        self._num_strays: list[int] = []
        self._num_waiting: list[int] = []
        """Number of the runs right below each run that have not been added yet."""
        self._checkpoints: dict[int, list[Checkpoint]] = {}
        self._found: dict[int, list[Node]] = {}
        self._bottom_up: list[int] = []
        self._kept: list[int] = []

    def find_ends(self) -> Slices:
        """Finds the ends of runs: roots, forks and leaves, older ones first."""
        nodes = list(self._tree.nodes.values())
        for root in self._tree.roots.values():
            self._add(root)
        left = self._visits
        for node in nodes:
            left -= 1
            if len(node.children) != 1:
                self._add(node)
                left -= _RUN_VISITS
            if left <= 0:
                left = self._visits
                yield

    def _add(self, end: Node) -> int:
        number = self._number[end] = len(self._above)
        self._above.append(_NONE)
        self._id.append(-1 - number)
        self._first.append(0)
        self._num_pages.append(0)
        self._num_strays.append(0)
        self._num_waiting.append(0)
        return number

    def walk(self) -> Slices:
        """Walks from each end up to the next one."""
        ends, wanted, left = self._number, self._wanted, self._visits
        queue = list(ends)
        for end in queue:
            if end.parent is not None and self._tree.nodes.get(end.digest) is not end:
                del ends[end]  # evicted since
                continue
            number, top, num_strays = ends[end], end, 0
            left -= _RUN_VISITS
            while True:
                if not top.num_reaching:
                    num_strays += 1
                if top.checkpoints or top in wanted:
                    self._note(number, top)
                left -= 1
                if left <= 0:
                    left = self._visits
                    yield
                parent = top.parent
                if parent is None or len(parent.children) != 1 or parent in ends:
                    break
                if parent.parent is None:
                    break
                top = parent
            if parent is not None:
                if parent not in ends:  # a fork since the ends were found
                    self._add(parent)
                    queue.append(parent)
                self._num_strays[number] = num_strays
                self._hang(number, top, end.depth - parent.depth, ends[parent])

    def _note(self, number: int, node: Node) -> None:
        """Records a node's checkpoints in its run, and the node itself if it was asked for."""
        if node.checkpoints:
            checkpoints = self._checkpoints.setdefault(number, [])
            checkpoints.extend(reversed(node.checkpoints.values()))
        if node in self._wanted:
            self._found.setdefault(number, []).append(node)

    def _hang(self, number: int, top: Node, num_pages: int, above: int) -> None:
        """Records the run that a run continues."""
        self._id[number] = top.page
        self._first[number] = top.depth - 1
        self._num_pages[number] = num_pages
        self._above[number] = above
        self._num_waiting[above] += 1

    def add_up(self) -> Slices:
        """Adds up the runs, pages and checkpoints below each run, from the leaves to the roots."""
        num = len(self._above)
        self._runs_below, self._pages_below = [0] * num, [0] * num
        self._checkpoints_below, self._weight = [0] * num, [0] * num
        ready = [number for number in self._number.values() if not self._num_waiting[number]]
        while ready:
            number = ready.pop()
            self._bottom_up.append(number)
            self._weight[number] += self._num_pages[number]
            if number in self._found:
                self._weight[number] += _ASKED_FOR
            above = self._above[number]
            if above != _NONE:
                self._add_to(above, number)
                if not self._num_waiting[above]:
                    ready.append(above)
            if len(self._bottom_up) % self._num_runs == 0:
                yield

    def _add_to(self, above: int, number: int) -> None:
        self._weight[above] += self._weight[number]
        self._runs_below[above] += self._runs_below[number] + 1
        self._pages_below[above] += self._pages_below[number] + self._num_pages[number]
        self._checkpoints_below[above] += self._checkpoints_below[number]
        self._checkpoints_below[above] += self._num_checkpoints(number)
        self._num_waiting[above] -= 1

    def _num_checkpoints(self, number: int) -> int:
        return len(self._checkpoints.get(number, ()))

    def choose(self, max_runs: int) -> Slices:
        """Keeps the heaviest runs, with weights compared by powers of two. The parent of a kept run
        is kept too: it weighs no less than its children, and of equal runs the upper comes
        first."""
        classes: dict[int, list[int]] = {}
        for place, number in enumerate(reversed(self._bottom_up), start=1):
            classes.setdefault(self._weight[number].bit_length(), []).append(number)
            if place % self._num_runs == 0:
                yield
        kept: dict[int, None] = {_NONE: None}
        for size in sorted(classes, reverse=True):
            for place, number in enumerate(classes[size], start=1):
                if len(kept) <= max_runs and self._above[number] in kept:
                    kept[number] = None
                if place % self._visits == 0:
                    yield
            if len(kept) > max_runs:
                break
        self._kept = sorted(kept)[1:]

    def view(self) -> Generator[None, None, View]:
        """Returns the kept runs in their original order, each with the totals of what is not listed
        below it."""
        index = {number: place for place, number in enumerate(self._kept)}
        runs: list[PageRun] = []
        for number in self._kept:
            runs.append(self._run(number, index))
            if len(runs) % self._num_runs == 0:
                yield
        for number in self._kept:
            if self._above[number] != _NONE:
                above = runs[index[self._above[number]]]
                above.num_others -= self._runs_below[number] + 1
                above.other_pages -= self._pages_below[number] + self._num_pages[number]
                above.other_checkpoints -= self._checkpoints_below[number]
                above.other_checkpoints -= self._num_checkpoints(number)
        return View(runs=runs, places=self._places(index), num_runs=len(self._bottom_up))

    def _run(self, number: int, index: dict[int, int]) -> PageRun:
        """Returns a run with the totals of its subtree; `view` subtracts the listed ones."""
        checkpoints = self._checkpoints.get(number, [])
        return PageRun(
            id=self._id[number],
            parent=index.get(self._above[number]),
            first=self._first[number],
            num_pages=self._num_pages[number],
            num_strays=self._num_strays[number],
            checkpoints=list(map(_view_of, checkpoints[:MAX_CHECKPOINTS])),
            num_checkpoints=len(checkpoints),
            num_others=self._runs_below[number],
            other_pages=self._pages_below[number],
            other_checkpoints=self._checkpoints_below[number],
        )

    def _places(self, index: dict[int, int]) -> dict[Node, int]:
        places: dict[Node, int] = {}
        for number, nodes in self._found.items():
            while number != _NONE and number not in index:
                number = self._above[number]
            if number != _NONE:
                places.update(dict.fromkeys(nodes, index[number]))
        return places


def _view_of(checkpoint: Checkpoint) -> CheckpointView:
    return CheckpointView(checkpoint.position, checkpoint.kind, checkpoint.num_uses)
