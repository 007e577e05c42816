"""Gated short convolution from the input projection to the output projection, over states that lie
beside pages, or in slots.

A state is a convolution's last J - 1 inputs. After p tokens it lies beside the page of token p - 1:
the page that is being filled, and once that is full it stays there as it is at the page's end. So
every page boundary can be resumed, and no request needs a slot. Where other layers have states that
are not there at every boundary, states lie in slots, as those of recurrent layers do.

This is the door to the op: callers import it from here, whatever computes it.
`ShortConvOperation.lay_out` chooses the kernels by the device's capabilities; what it returns is
what `mix` goes by. `reference` is the definition, on any device.

Legend: T tokens, C channels, J taps (kernel size).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.layout.batch import Batch
from milepost.kernels.platform.device import Chip
from milepost.kernels.short_conv import items, reference
from milepost.kernels.short_conv.items import ShortConvItems
from milepost.kernels.short_conv.reference import ShortConvRows

__all__ = ["ShortConvOperation", "mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvOperation:
    """Convolutions of `num_taps` taps."""

    num_taps: int
    in_slots: bool = False
    """Whether states lie in slots."""

    def lay_out(self, batch: Batch) -> ShortConvItems | ShortConvRows:
        """Items for the fused kernels, or rows for the reference."""
        if batch.chip is None:
            return reference.lay_out(batch, self.num_taps, in_slots=self.in_slots)
        return items.lay_out(batch, in_slots=self.in_slots)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        return ""


def mix(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    layout: ShortConvItems | ShortConvRows,
    records: Tensor | None = None,
) -> Tensor:
    """Advance the sequences by all their tokens, as `layout` has them; returns [T, C] and writes
    the states at every page's end and where a sequence stops.

    `projected` [T, 3 * C]: gates before the convolution, gates after it, x. `weight` [C, J],
    `bias` [C]. `pool` [1 + pages, C, J - 1], oldest first: zeros, which nothing writes, and what
    lies beside each page; or [slots, C, J - 1].

    `records` [rows, J - 1 + drafts, C] hold, of each sequence that had drafts in its step before,
    what the convolution read after its own token: J - 1 inputs, and those of the drafts. Where the
    sequence goes on is known only now, so its state is read there; what lies beside its page may be
    that of drafts which were rejected, and in its slot is that before the drafts. Those of this
    step's drafts take their place.
    """
    if isinstance(layout, ShortConvRows):
        return reference.mix(projected, weight, bias, pool, layout, records)
    from milepost.kernels.short_conv import triton

    return triton.mix(projected, weight, bias, pool, layout, records)
