"""Which kernel multiplies quantised experts on a GPU.

Legend: T tokens, H hidden size, X experts, N experts of a token, P = T * N routed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from milepost.kernels import moe
from milepost.kernels.device import Chip, probe, runs_gluon
from milepost.kernels.emit import Activations, values_of
from milepost.kernels.moe.grouping import MANY_ROUTED, Groups, group_few, group_many
from milepost.kernels.quantised import (
    triton_experts,
    triton_gemv,
    triton_gemv_experts,
    triton_rounding,
    triton_tall,
    triton_unpack,
)
from milepost.kernels.quantised.forms import BLOCK, FP8, FourBits, Fp8, Int4, Quantised
from milepost.kernels.quantised.triton_tiles import MANY, choose, runs_hopper, suits

_FEWEST_ROUTED = 40
"""Up to this many routed tokens nothing is grouped."""
_TOKENS_AT_ONCE = 64
"""Up to this many tokens Hopper multiplies FP8 experts in one launch."""
_FEW_NIBBLES = 10
"""Beyond so many routed tokens an expert Hopper multiplies four-bit weights in tall blocks (9 take
244 us, 216 otherwise; 14 take 246 and 300)."""
_TALL_ROUTED, _UNPACKED_ROUTED = 32, 112
"""Beyond so many routed tokens an expert the GEMMs are bound by arithmetic; or it is faster to make
16-bit weights of four bits first."""


def mix(
    rows: Activations, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised
) -> Tensor | None:
    """A partial for each routed token: [T, N, H], in the rows' dtype; None where there is no kernel
    for it."""
    if not suits(rows, up, down):
        return None
    num_tokens, num_chosen = experts.shape
    num_experts, size = len(up.scales), down.num_inputs
    num_routed, chip = experts.numel(), probe(rows.device)
    is_gated = up.num_outputs == 2 * size
    output = rows.new_empty(num_tokens, num_chosen, down.num_outputs)
    if num_routed <= _FEWEST_ROUTED and triton_gemv.suits(up, down):
        if runs_hopper(rows, up, down):
            from milepost.kernels.quantised import triton_hopper_row_experts

            return triton_hopper_row_experts.mix(values_of(rows), shares, experts, up, down, chip)
        active = rows.new_empty(num_routed, size)
        triton_gemv_experts.project_up(
            values_of(rows), experts, up, active, chip, is_gated=is_gated
        )
        triton_gemv_experts.project_down(active, shares, experts, down, output, chip)
        return output
    if runs_gluon(rows) and num_tokens <= _TOKENS_AT_ONCE:
        from milepost.kernels.quantised import triton_hopper_experts

        if triton_hopper_experts.suits(up, down):
            assert isinstance(up, Fp8), "what the kernel suits"
            assert isinstance(down, Fp8), "what the kernel suits"
            values, scales = triton_rounding.round_lines(rows, up, chip)
            triton_hopper_experts.mix(values, scales, shares, experts, up, down, output, chip)
            return output
    if runs_gluon(rows) and _mix_nibbles(rows, shares, experts, up, down, output, chip):
        return output
    if num_routed > _TALL_ROUTED * num_experts and triton_tall.suits(chip, up, down):
        _mix_tall(rows, shares, experts, up, down, output, chip)
        return output
    if num_routed > _UNPACKED_ROUTED * num_experts and isinstance(up, FourBits):
        assert isinstance(down, FourBits), "experts have one form"
        wide = [triton_unpack.unpack(each, rows.dtype) for each in (up, down)]
        return moe.partials(values_of(rows), shares, experts, *wide)
    tiles = choose(num_routed / num_experts, up).fitted(chip)
    groups: Groups | Tensor = experts
    are_few = num_routed <= _FEWEST_ROUTED
    if not are_few:
        group = group_many if num_routed > MANY_ROUTED else group_few
        groups = group(experts, num_experts, tiles.block_m)
    active = rows.new_empty(num_routed, size)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    narrow = replace(tiles, block_n=64, num_warps=8 if tiles.block_m == MANY.block_m else 4)
    values, scales = triton_rounding.round_rows(rows, up, chip, are_few=are_few)
    triton_experts.project_up(values, scales, up, active, groups, narrow, chip, is_gated=is_gated)
    values, scales = triton_rounding.round_rows(active, down, chip, are_few=are_few)
    last = narrow if isinstance(down, FourBits) and tiles.block_m < MANY.block_m else tiles
    triton_experts.project_down(values, scales, shares, down, output, groups, last, chip)
    return output


def _mix_nibbles(
    rows: Activations,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    output: Tensor,
    chip: Chip,
) -> bool:
    """Whether Hopper's own kernels of four-bit weights made `output` [T, N, H] what `mix` is."""
    if not isinstance(up, Int4) or experts.numel() <= _FEWEST_ROUTED:
        return False
    from milepost.kernels.quantised import triton_hopper_nibble_experts as few
    from milepost.kernels.quantised import triton_hopper_nibbles_tall as many

    assert isinstance(down, Int4), "experts have one form"
    num_rows, hidden = experts.numel() / len(up.scales), values_of(rows)
    if num_rows > _FEW_NIBBLES and many.suits(hidden, up, down):
        many.mix(hidden, shares, experts, up, down, output, chip, many.choose_rows(num_rows))
    elif num_rows <= _FEW_NIBBLES and few.suits(up, down):
        few.mix(hidden, shares, experts, up, down, output, chip)
    else:
        return False
    return True


def _mix_tall(
    rows: Activations,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    output: Tensor,
    chip: Chip,
) -> None:
    """`mix` into `output` [P, H] of so many rows an expert that they are multiplied in tall blocks:
    on Hopper by a kernel that lays its own output out by blocks."""
    assert isinstance(up, Fp8), "what the kernels suit"
    assert isinstance(down, Fp8), "what the kernels suit"
    num_rows, size = experts.numel(), down.num_inputs
    groups, tall = group_many(experts, len(up.scales), triton_tall.BLOCK_M), triton_tall
    if runs_gluon(rows):
        from milepost.kernels.quantised import triton_tall_hopper as tall

        num_rows = groups.blocks.shape[1] * triton_tall.BLOCK_M
    active = rows.new_empty(num_rows, size, dtype=FP8)
    active_scales = rows.new_empty(size // BLOCK, num_rows, dtype=torch.float32)
    how = {"is_gated": up.num_outputs == 2 * size, "is_bfloat": rows.dtype == torch.bfloat16}
    values, scales = triton_rounding.round_rows(rows, up, chip, are_few=False)
    assert scales is not None, "FP8 rounds its rows"
    tall.project_up(values, scales, up, active, active_scales, groups, chip, **how)
    tall.project_down(active, active_scales, shares, down, output, groups, chip)
