"""N-gram embeddings: rows of a table in host memory, chosen by hashes of a token and those before
it (Engram, arXiv 2601.07372; as Qwen3.8-Flash-Next has them).

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition, on any device; on a GPU `rows.triton` reads the table, over the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.kernels.layout.batch import Batch
from milepost.kernels.mtp import CarryRows, lay_out
from milepost.kernels.ngrams.reference import (
    NUM_DIGITS,
    NgramSequences,
    continued,
    decode_ids,
    encode_ids,
    hash_ids,
    keep,
)
from milepost.kernels.platform.device import Chip
from milepost.kernels.rows import take_from_host

__all__ = [
    "NUM_DIGITS",
    "NgramOperation",
    "NgramSequences",
    "continued",
    "decode_ids",
    "encode_ids",
    "hash_ids",
    "keep",
    "take_from_host",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOperation:
    """Says which of a step's tokens begin a sequence, and which states are kept."""

    def lay_out(self, batch: Batch) -> CarryRows:
        """Lays out a step as for a head, which carries a state beside those of slots likewise."""
        return lay_out(batch)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """No kernel takes states in and keeps them yet."""
        return "n-gram embeddings have no fused kernel yet"
