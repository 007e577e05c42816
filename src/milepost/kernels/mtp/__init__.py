"""The inputs of an MTP head: each token's embedding, and the hidden state before it.

In a step the state before a token is that after the previous token of the batch. Before a
sequence's first it is *carried*: each slot holds the last hidden state of the tokens that it stands
for. So a hit, whose tokens are not in the batch, has it too, bit for bit. After accepted drafts it
is one of the recorded states; recurrent layers record theirs likewise.

Callers import the operations from here. `reference` is the definition, on any device; on a GPU
`triton` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.kernels.layout.batch import Batch
from milepost.kernels.mtp import reference
from milepost.kernels.mtp.reference import Carried, CarryRows, lay_out
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import fused

__all__ = [
    "Carried",
    "CarryOperation",
    "CarryRows",
    "join",
    "keep",
    "keep_states",
    "lay_out",
]

join = fused("mtp.triton")(reference.join)
keep = fused("mtp.triton")(reference.keep)
keep_states = fused("mtp.triton")(reference.keep_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOperation:
    """Says which hidden state precedes each token, and which ones slots carry on."""

    def lay_out(self, batch: Batch) -> CarryRows:
        """Lays out a step, alike for the fused kernels and the reference."""
        return lay_out(batch)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Returns nothing: the fused kernels run on every chip that Triton supports."""
        return ""
