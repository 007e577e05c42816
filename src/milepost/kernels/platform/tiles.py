"""Tiles of GEMMs: how they are cut into programs, and those into steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.kernels.platform.device import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Programs of `block_m` rows and `block_n` outputs, `block_k` inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """Whether the weight is the left operand, which fills the tall side of tensor cores if rows are
    few."""
    scales_first: bool = False
    """Weights of Int4 are scaled before they are multiplied, in place of their groups' sums: with
    many rows there are more sums than weights."""

    def fitted(self, chip: Chip, *, num_weights: int = 1, num_bytes: int = 2) -> Tiles:
        """Returns tiles with as many stages as the chip has room for in types of `num_bytes`; a
        step holds tiles of `num_weights` weights."""
        step = (self.block_m + num_weights * self.block_n) * self.block_k * num_bytes
        return replace(self, num_stages=chip.choose_stages(self.num_stages, step))


def choose_split_k(num_outputs: int, num_inputs: int, tiles: Tiles, num_sms: int) -> int:
    """Returns the number of parts along the inputs of a GEMM with few rows, so that nearly each SM
    has a program.

    Up to half as many start while the kernel before still runs; more would crowd on the few SMs
    that are free by then.
    """
    split_k, programs = 1, -(-num_outputs // tiles.block_n)
    wanted = num_programs(num_sms)
    while programs * split_k < wanted and num_inputs >= 4 * split_k * tiles.block_k:
        split_k *= 2
    return split_k


def num_programs(num_sms: int) -> int:
    """Returns the number of programs of a GEMM of few rows: one for nearly each SM."""
    return 1 << (num_sms.bit_length() - 1)


def cdiv(number: int, divisor: int) -> int:
    """Returns the quotient, rounded up. (Triton's own cdiv takes as long as a small allocation on
    the host.)"""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the least power of two that is no less than a positive `number`."""
    return 1 << (number - 1).bit_length()
