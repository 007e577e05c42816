"""The ranks of a model: which one this is, the part it keeps, and their collective operations.

A rank keeps whole heads, feed-forward units, experts and vocabulary ids. Its outputs are partial
sums over all ranks, as split-K partials are; the next norm adds them up. The order of the sum is
the same on all ranks, so all of them continue with the same bits.

Legend: T tokens, P partials of this rank, C hidden size, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from milepost.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Link(Protocol):
    """Collective operations between ranks. All ranks make each call, in the same order."""

    @property
    def order(self) -> str:
        """Names how sums are made, if their bits depend on more than the number of ranks."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Returns the sum of all ranks' values; `values` may be overwritten."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """Returns all ranks' `values` [R, n] side by side: [R, n * size]."""
        ...

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        """Applies `norm.add_norm` to the partials [T, P, C] of all ranks."""
        ...

    def least(self, value: int) -> int:
        """Returns the smallest of all ranks' values."""
        ...

    def gather(self, body: bytes) -> list[bytes]:
        """Returns the bytes from each rank, in rank order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of `size` ranks. Without a link it only has sizes and cannot run."""

    rank: int = 0
    size: int = 1
    link: Link | None = None
    splits_experts: bool = False
    """Whether each expert is on one rank as a whole, rather than a part of each on every rank."""

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank, so that nothing is summed."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def share(self, count: int, what: str) -> Cut:
        """Returns this rank's equal part of `count` heads, units or ids. Raises ConfigError, naming
        `what`, if `count` cannot be divided."""
        if count % self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {what}={count} is not a multiple of it"
            )
        size = count // self.size
        return Cut(count, ((self.rank * size, size),))

    def share_few(self, count: int, what: str) -> Cut:
        """Returns this rank's part of `count` KV heads. If there are fewer of them than ranks,
        several ranks each keep a copy."""
        if count % self.size == 0 or self.size % count:
            return self.share(count, what)
        return Cut(count, ((self.rank * count // self.size, 1),))

    def segments(self, *counts: int, what: str) -> Cut:
        """Returns this rank's part of several consecutive segments."""
        return join(*(self.share(count, what) for count in counts))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sums values over all ranks: see `Link.all_reduce`."""
        return values if self.is_alone else self._reached.all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        """Puts the values of all ranks side by side: see `Link.all_gather`."""
        return values if self.is_alone else self._reached.all_gather(values)

    @property
    def order(self) -> str:
        """Names how sums are made: see `Link.order`."""
        return "" if self.is_alone else self._reached.order

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' partials to the stream, and norms it: see `Link.add_norm`."""
        return self._reached.add_norm(hidden, partials, scale, eps, multiplier)

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values: see `Link.least`."""
        return value if self.is_alone else self._reached.least(value)

    def gather(self, body: bytes) -> list[bytes]:
        """Returns the bytes from each rank: see `Link.gather`."""
        return [body] if self.is_alone else self._reached.gather(body)

    @property
    def _reached(self) -> Link:
        assert self.link is not None, "ranks without a link only have sizes"
        return self.link


ALONE = Ranks()
"""The only rank of a model on one device."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The entries of a dimension that a rank keeps: those in `spans` (first, count), one after the
    other, out of `full`.

    tensor    |--- q ---|--- k ---|------ v ------|        three segments, two ranks
    rank 0    |----|    |----|    |-------|
    rank 1         |----|    |----|       |-------|
    """

    full: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(cls, full: int) -> Cut:
        """Keeps all `full` entries."""
        return cls(full, ((0, full),))

    @property
    def is_whole(self) -> bool:
        """Whether all entries are kept."""
        return self.size == self.full

    @property
    def size(self) -> int:
        """Number of entries that are kept."""
        return sum(count for _, count in self.spans)

    def times(self, unit: int) -> Cut:
        """Scales a cut of units to a cut of entries, with `unit` entries each: heads of `unit`
        rows, say."""
        spans = tuple((first * unit, count * unit) for first, count in self.spans)
        return Cut(self.full * unit, spans)

    def within(self, unit: int, what: str) -> Cut:
        """Returns this cut in blocks of `unit` entries; the last block may be smaller. Raises
        ConfigError, naming the tensor, if a rank's part is not whole blocks."""
        ends = {end for first, count in self.spans for end in (first, first + count)}
        if any(end % unit for end in ends - {self.full}):
            raise ConfigError(
                f"{what}: a rank's part is not whole blocks of {unit}; use a smaller "
                "tensor_parallel_size"
            )
        spans = ((first // unit, -(-(first + count) // unit)) for first, count in self.spans)
        return Cut(-(-self.full // unit), tuple((first, end - first) for first, end in spans))


def join(*cuts: Cut) -> Cut:
    """Joins cuts of consecutive segments into one."""
    spans: list[tuple[int, int]] = []
    full = 0
    for each in cuts:
        spans += ((full + first, count) for first, count in each.spans)
        full += each.full
    return Cut(full, tuple(spans))


@dataclass(frozen=True, slots=True)
class Axes:
    """Dimensions of a projection's outputs and inputs in one of its tensors, as (dimension, outputs
    or inputs per entry). None if the tensor has no such dimension."""

    outputs: tuple[int, int] | None = (0, 1)
    inputs: tuple[int, int] | None = (1, 1)

    def stacked(self, num_dims: int) -> Axes:
        """Returns the axes of a stack of such tensors, which has `num_dims` more dimensions in
        front."""
        outputs, inputs = (
            axis and (axis[0] + num_dims, axis[1]) for axis in (self.outputs, self.inputs)
        )
        return Axes(outputs, inputs)
