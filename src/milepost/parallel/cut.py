"""Describes the part of a checkpoint tensor's dimension that a rank keeps. Pure arithmetic.

tensor    |--- q ---|--- k ---|------ v ------|        three segments, two ranks
rank 0    |----|    |----|    |-------|
rank 1         |----|    |----|       |-------|
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """The entries of a dimension that a rank keeps: those in `spans` (first, count), one after the
    other, out of `full`."""

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

    def behind(self, num_dims: int) -> Axes:
        """Returns the axes in a stack of such tensors, with `num_dims` dimensions before theirs."""
        outputs, inputs = (
            axis and (axis[0] + num_dims, axis[1]) for axis in (self.outputs, self.inputs)
        )
        return Axes(outputs, inputs)
