"""What fused decodes need to know of a step whose last program of a group finishes for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milepost.kernels.layout.chunks import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Where every sequence decodes."""

    arrivals: Array
    """[S, G] zeros: programs of a group that have read all they need. The last one resets it, so
    that all layers of a step share it."""


def lay_out_decodes(num_sequences: int, num_groups: int) -> DecodeLayout:
    return DecodeLayout(arrivals=np.zeros((num_sequences, num_groups), np.int32))
