"""The ranks of a model: which one this is, what it keeps, and what they do together.

A rank keeps whole heads, units of a feed-forward, experts and ids of the vocabulary. The outputs of
its parts are partial sums over all ranks, as split-K partials are; the norm that reads them next
adds them up. The order of the sum is the same on all ranks, so all of them continue with the same
bits.

Legend: T tokens, P partials of this rank, C hidden size, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from milepost.errors import ConfigError
from milepost.parallel.cut import Cut, join


class Link(Protocol):
    """How ranks reach each other. Each call is made by all of them, in the same order."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values; `values` may be overwritten."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """All ranks' `values` [R, n] side by side: [R, n * size]."""
        ...

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        """`norm.add_norm` of all ranks' partials [T, P, C]."""
        ...

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        ...

    def gather(self, body: bytes) -> list[bytes]:
        """What all ranks hand in, in their order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of `size` ranks. Without a link it has sizes, and cannot run."""

    rank: int = 0
    size: int = 1
    link: Link | None = None
    splits_experts: bool = False
    """Each expert is on one rank as a whole, rather than a part of each on every rank."""

    @property
    def is_alone(self) -> bool:
        """Nothing is to be added up."""
        return self.size == 1

    def share(self, count: int, what: str) -> Cut:
        """This rank's equal part of `count` heads, units or ids. Raises ConfigError by the name
        `what` if there is none."""
        if count % self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {what}={count} is not a multiple of it"
            )
        own = count // self.size
        return Cut(count, ((self.rank * own, own),))

    def share_few(self, count: int, what: str) -> Cut:
        """The same of what several ranks may each have a copy of, where there are fewer than ranks:
        KV heads."""
        if count % self.size == 0 or self.size % count:
            return self.share(count, what)
        return Cut(count, ((self.rank * count // self.size, 1),))

    def segments(self, *counts: int, what: str) -> Cut:
        """Its part of each of several segments."""
        return join(*(self.share(count, what) for count in counts))

    def all_reduce(self, values: Tensor) -> Tensor:
        """See `Link`."""
        return values if self.is_alone else self._reached.all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        """See `Link`."""
        return values if self.is_alone else self._reached.all_gather(values)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        """See `Link`; of several ranks."""
        return self._reached.add_norm(hidden, partials, scale, eps, multiplier)

    def least(self, value: int) -> int:
        """See `Link`."""
        return value if self.is_alone else self._reached.least(value)

    def gather(self, body: bytes) -> list[bytes]:
        """See `Link`."""
        return [body] if self.is_alone else self._reached.gather(body)

    @property
    def _reached(self) -> Link:
        assert self.link is not None, "ranks without a link only have sizes"
        return self.link


ALONE = Ranks()
"""The one rank of a model on one device."""
