"""What a rank keeps of a dimension of a checkpoint's tensor. Pure arithmetic.

tensor    |--- q ---|--- k ---|------ v ------|        three segments, two ranks
rank 0    |----|    |----|    |-------|
rank 1         |----|    |----|       |-------|
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """Of `full` entries those in `spans` (first, count), one behind the other."""

    full: int
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(cls, full: int) -> Cut:
        """All of so many."""
        return cls(full, ((0, full),))

    @property
    def is_whole(self) -> bool:
        """Whether all is kept."""
        return self.size == self.full

    @property
    def size(self) -> int:
        """Entries that are kept."""
        return sum(count for _, count in self.spans)

    def times(self, unit: int) -> Cut:
        """Of entries that are so many each: heads, say, of `unit` rows."""
        spans = tuple((first * unit, count * unit) for first, count in self.spans)
        return Cut(self.full * unit, spans)

    def within(self, unit: int, what: str) -> Cut:
        """Of blocks of `unit` entries, of which the last may be smaller. Raises ConfigError, naming
        the tensor, if the ranks' parts are not whole blocks."""
        ends = {end for first, count in self.spans for end in (first, first + count)}
        if any(end % unit for end in ends - {self.full}):
            raise ConfigError(
                f"{what}: a rank's part is not whole blocks of {unit}; use a smaller "
                "tensor_parallel_size"
            )
        spans = ((first // unit, -(-(first + count) // unit)) for first, count in self.spans)
        return Cut(-(-self.full // unit), tuple((first, end - first) for first, end in spans))


def join(*cuts: Cut) -> Cut:
    """Of segments that stand one behind the other."""
    spans: list[tuple[int, int]] = []
    full = 0
    for each in cuts:
        spans += ((full + first, count) for first, count in each.spans)
        full += each.full
    return Cut(full, tuple(spans))


@dataclass(frozen=True, slots=True)
class Axes:
    """Where a projection's outputs and inputs lie in one of its tensors: (dimension, how many of
    them an entry stands for); None where the tensor says nothing of each."""

    outputs: tuple[int, int] | None = (0, 1)
    inputs: tuple[int, int] | None = (1, 1)

    def behind(self, num_dims: int) -> Axes:
        """In a stack of such tensors, with so many dimensions before theirs."""
        outputs, inputs = (
            axis and (axis[0] + num_dims, axis[1]) for axis in (self.outputs, self.inputs)
        )
        return Axes(outputs, inputs)
