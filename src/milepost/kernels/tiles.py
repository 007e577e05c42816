"""How a GEMM is cut up into programs, and those into steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.kernels.device import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of `block_m` rows and `block_n` outputs, `block_k` inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """The weight is the left operand: with few rows it fills the tensor cores' tall side."""

    def fitted(self, chip: Chip, *, num_weights: int = 1) -> Tiles:
        """The same with as many stages as the chip has room for in 16-bit types; a step holds the
        tiles of so many weights."""
        step = (self.block_m + num_weights * self.block_n) * self.block_k * 2
        return replace(self, num_stages=chip.choose_stages(self.num_stages, step))
