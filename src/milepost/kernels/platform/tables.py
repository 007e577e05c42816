"""Tables of kernels: what a row states, and how the kernel that serves a problem is chosen.

Dense products, routed experts and recurrences have such a table each. The first row that serves a
problem is its kernel; rows after it are for those that it refuses. Operations with one kernel are
`fused` with it. Nothing here imports Triton or needs a GPU.

A kernel's order is the one in which an output's terms are added; kernels with different orders
return different bits. "128 seq" adds blocks of 128 inputs one after the other in float32, "split S"
adds S parts that were added so, and "tree" adds parts pairwise. "By fragments" takes a block's
inputs in the order in which registers hold the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, lru_cache, wraps
from importlib import import_module
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from milepost.kernels.platform.device import Chip, allows_hopper_kernels, runs_triton, why_no_gluon

HOPPER = "sm_90"
"""Value of `needs` for kernels that use Hopper's own instructions."""
_MOST_REMEMBERED = 1 << 14
"""Choices that are kept."""


class SumOrder(IntEnum):
    """How the order in which a row's terms are added depends on the number of rows of a step. Of
    two demands the greater one holds."""

    FREE = 0
    """On whatever is fastest."""
    LIKE_MANY = 1
    """Few rows, such as a cache hit leaves of a prefill, are added up as many are, where that costs
    little."""
    FIXED = 2
    """On nothing: a row's bits are the same beside any other rows."""

    @property
    def is_fixed(self) -> bool:
        return self is SumOrder.FIXED


class Problem(Hashable, Protocol):
    """Properties of a computation that decide which kernel runs."""

    @property
    def form(self) -> type[Any]:
        """The form of the computation's weights."""
        ...

    def count(self, unit: str) -> float:
        """Returns the number of rows in a unit of `RowRange`."""
        ...

    def why_not(self, kernel: Kernel[Any]) -> str:
        """Why the kernel does not serve the problem, as far as its row's other fields say; empty if
        it may."""
        ...


P = TypeVar("P", bound=Problem)
A = ParamSpec("A")
R = TypeVar("R")
Cut = Callable[[P, Chip], Any]
Condition = tuple[str, Callable[[P, Chip], bool]]
"""A reason for refusal, and the condition under which it does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Numbers of rows that a kernel serves."""

    above: int = 0
    most: int | None = None
    unit: str = ""
    """Unit of the counts, such as "an expert"; empty for all rows of a product."""

    def have(self, count: float) -> bool:
        return count > self.above and (self.most is None or count <= self.most)

    def __str__(self) -> str:
        first, unit = self.above + 1, self.unit and f" {self.unit}"
        if self.most is None:
            return f"from {first}{unit}" if self.above else "any"
        return f"{first}{unit}" if first == self.most else f"{first} to {self.most}{unit}"


def not_cut(problem: Problem, chip: Chip) -> None:
    """Leaves the tiles to the kernel's own module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel(Generic[P]):
    """A row of a table."""

    name: str
    module: str
    """Path below `milepost.kernels`."""
    entry: str = "run"
    """Name of the module's function that launches the kernel."""
    forms: tuple[type[Any], ...]
    rows: RowRange = field(default_factory=RowRange)
    needs: str = ""
    """Requirement on the chip: Hopper's own instructions, something that the conditions ask for, or
    nothing."""
    epilogues: tuple[Any, ...] = ()
    takes_bias: bool = True
    conditions: tuple[Condition[P], ...] = ()
    """Conditions of the problems with such rows that the kernel serves."""
    cut: Cut[P] = not_cut
    """Returns the tiles of a problem that the kernel serves."""
    order: str
    """May name fields of the tiles."""
    serves: SumOrder = SumOrder.FREE
    """Strictest order that it serves. All kernels of a form that serve FIXED have the same one."""

    @property
    def is_hopper(self) -> bool:
        return self.needs == HOPPER

    @property
    def run(self) -> Callable[..., Any]:
        """The module's entry. Imports the module, which may need Triton."""
        return _find(self.module, self.entry)

    def why_not(self, problem: P, chip: Chip) -> str:
        """Returns why another kernel serves the problem; empty if this one may."""
        if problem.form not in self.forms:
            return "another form"
        if not self.rows.have(problem.count(self.rows.unit)):
            return f"rows: {self.rows}"
        if reason := problem.why_not(self):
            return reason
        if self.is_hopper and (reason := why_no_gluon(chip)):
            return reason
        missing = (reason for reason, holds in self.conditions if not holds(problem, chip))
        return next(missing, "")


def row(
    name: str,
    module: str,
    forms: tuple[type[Any], ...],
    order: str,
    *when: Condition[P],
    **rest: Any,
) -> Kernel[P]:
    """Returns a row whose kernel serves the problems that all the conditions hold for; `rest` has
    the other fields of `Kernel`."""
    return Kernel(name=name, module=module, forms=forms, order=order, conditions=when, **rest)


def fused(module: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Makes an operation of its definition: where the first argument is a tensor that Triton's
    kernels take, the function of that name in `module` runs instead."""

    def decorate(definition: Callable[A, R]) -> Callable[A, R]:
        @wraps(definition)
        def operation(*args: A.args, **options: A.kwargs) -> R:
            tensor: Any = args[0]
            if not runs_triton(tensor):
                return definition(*args, **options)
            computed: R = _find(module, definition.__name__)(*args, **options)
            return computed

        return operation

    return decorate


@cache
def _find(module: str, entry: str) -> Callable[..., Any]:
    """Imports a function from a module below `milepost.kernels` when it is needed: machines without
    a GPU may lack Triton."""
    found: Callable[..., Any] = getattr(import_module(f"milepost.kernels.{module}"), entry)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice(Generic[P]):
    """The kernel that serves a problem, and its tiles."""

    kernel: Kernel[P]
    tiles: Any

    @property
    def split_k(self) -> int:
        return getattr(self.tiles, "split_k", 1)

    @property
    def order(self) -> str:
        """The order in which an output's terms are added, with the number of splits."""
        split = f", split {self.split_k}" if self.split_k > 1 else ""
        return self.kernel.order.format(tiles=self.tiles) + split


class KernelTable(Generic[P]):
    """Rows of kernels, and the choices that were made from them."""

    def __init__(self, *kernels: Kernel[P]) -> None:
        self.kernels: Sequence[Kernel[P]] = kernels
        self._remembered = lru_cache(maxsize=_MOST_REMEMBERED)(self._choose)

    def choose(self, problem: P, chip: Chip) -> KernelChoice[P] | None:
        """Returns the first kernel that serves the problem on the chip, or None."""
        return self._remembered(problem, chip, allows_hopper_kernels())

    def _choose(self, problem: P, chip: Chip, allowed: bool) -> KernelChoice[P] | None:  # noqa: ARG002
        for kernel in self.kernels:
            if not kernel.why_not(problem, chip):
                return KernelChoice(kernel=kernel, tiles=kernel.cut(problem, chip))
        return None

    def refusals(self, problem: P, chip: Chip) -> Iterator[tuple[Kernel[P], str]]:
        """Yields the kernels of the form before the one that serves the problem, and why they do
        not."""
        for kernel in self.kernels:
            if problem.form in kernel.forms:
                reason = kernel.why_not(problem, chip)
                if not reason:
                    return
                yield kernel, reason

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Leaves out rows with these names or modules inside: for tests and `bench/price.py`."""
        kernels = self.kernels
        self.kernels = [each for each in kernels if {each.name, each.module}.isdisjoint(names)]
        self.forget()
        try:
            yield
        finally:
            self.kernels = kernels
            self.forget()

    def forget(self) -> None:
        """Forgets all choices that were made."""
        self._remembered.cache_clear()
