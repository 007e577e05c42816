"""Runs the kernels that `products.expert_table` chooses for quantised experts on a GPU.

Legend: T tokens, H hidden size, X experts, N experts of a token, P = T * N routed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from milepost.kernels.layout.emit import Activations, values_of
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.products import moe
from milepost.kernels.products.expert_table import EXPERTS, UNGROUPED, Mixture
from milepost.kernels.products.forms.matrix import Matrix
from milepost.kernels.products.forms.quantised import BLOCK, FP8, FourBits, Fp8, Int4, Quantised
from milepost.kernels.products.grouping import MANY_ROUTED, Groups, group_few, group_many
from milepost.kernels.products.portable import (
    fp8_grouped as triton_tall,
)
from milepost.kernels.products.portable import (
    quantised_gemv_experts,
    quantised_grouped,
    rounding,
    unpack,
)
from milepost.kernels.products.portable.quantised_tiles import MANY, choose, suits

_ON_HOPPER = {"fp8_experts", "int4_experts", "int4_grouped_up"}


def mix(
    rows: Activations, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised
) -> Tensor | None:
    """A partial for each routed token: [T, N, H], in the rows' dtype; None where there is no kernel
    for it."""
    if not suits(rows, up, down):
        return None
    chip, (num_tokens, num_chosen) = probe(rows.device), experts.shape
    choice = EXPERTS.choose(_mixture(rows, experts, up, down), chip)
    assert choice is not None, "the last row of a form serves all"
    name = choice.kernel.module.rpartition(".")[2]
    given = rows, shares, experts, up, down
    if name == "gemv_experts":
        from milepost.kernels.products.hopper import gemv_experts

        return gemv_experts.mix(values_of(rows), *given[1:], chip)
    if name == "unpack":
        assert isinstance(up, FourBits), "the kernel's forms"
        assert isinstance(down, FourBits), "experts have one form"
        wide = [unpack.unpack(each, rows.dtype) for each in (up, down)]
        return moe.partials(values_of(rows), shares, experts, *wide)
    output = rows.new_empty(num_tokens, num_chosen, down.num_outputs)
    if name == "quantised_gemv_experts":
        active = rows.new_empty(experts.numel(), down.num_inputs)
        is_gated = up.num_outputs == 2 * down.num_inputs
        hidden = values_of(rows)
        quantised_gemv_experts.project_up(hidden, experts, up, active, chip, is_gated=is_gated)
        quantised_gemv_experts.project_down(active, shares, experts, down, output, chip)
    elif name in _ON_HOPPER:
        _mix_on_hopper(name, *given, output, chip)
    elif name in {"fp8_grouped", "fp8_grouped_up"}:
        _mix_tall(*given, output, chip, on_hopper=name == "fp8_grouped_up")
    else:
        _mix_grouped(*given, output, chip)
    return output


def _mixture(rows: Activations, experts: Tensor, up: Quantised, down: Quantised) -> Mixture:
    num_tokens, num_chosen = experts.shape
    values, alignment = rows.values, 16
    if values is not None and (values.stride(0) % 16 or values.data_ptr() % 16):
        alignment = 1
    return Mixture(
        up=Matrix.of(up),
        down=Matrix.of(down),
        num_experts=len(up.scales),
        num_tokens=num_tokens,
        num_chosen=num_chosen,
        alignment=alignment,
    )


def _mix_on_hopper(
    name: str,
    rows: Activations,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    output: Tensor,
    chip: Chip,
) -> None:
    """`mix` into `output` by a kernel for Hopper that has both projections."""
    if isinstance(up, Fp8):
        from milepost.kernels.products.hopper import fp8_experts

        assert isinstance(down, Fp8), "experts have one form"
        values, scales = rounding.round_lines(rows, up, chip)
        fp8_experts.mix(values, scales, shares, experts, up, down, output, chip)
        return
    from milepost.kernels.products.hopper import int4_experts, int4_grouped_up

    assert isinstance(up, Int4), "the kernels' form"
    assert isinstance(down, Int4), "experts have one form"
    given = values_of(rows), shares, experts, up, down, output, chip
    if name == "int4_grouped_up":
        int4_grouped_up.mix(*given, int4_grouped_up.choose_rows(experts.numel() / len(up.scales)))
    else:
        int4_experts.mix(*given)


def _mix_grouped(
    rows: Activations,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    output: Tensor,
    chip: Chip,
) -> None:
    """`mix` into `output` by GEMMs of the rows that share an expert, or of each row if they are
    few."""
    num_routed, num_experts, size = experts.numel(), len(up.scales), down.num_inputs
    tiles = choose(num_routed / num_experts, is_fp8=isinstance(up, Fp8)).fitted(chip)
    groups: Groups | Tensor = experts
    are_few = num_routed <= UNGROUPED
    if not are_few:
        group = group_many if num_routed > MANY_ROUTED else group_few
        groups = group(experts, num_experts, tiles.block_m)
    active = rows.new_empty(num_routed, size)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    narrow = replace(tiles, block_n=64, num_warps=8 if tiles.block_m == MANY.block_m else 4)
    how = {"is_gated": up.num_outputs == 2 * size}
    values, scales = rounding.round_rows(rows, up, chip, are_few=are_few)
    quantised_grouped.project_up(values, scales, up, active, groups, narrow, chip, **how)
    values, scales = rounding.round_rows(active, down, chip, are_few=are_few)
    last = narrow if isinstance(down, FourBits) and tiles.block_m < MANY.block_m else tiles
    quantised_grouped.project_down(values, scales, shares, down, output, groups, last, chip)


def _mix_tall(
    rows: Activations,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    output: Tensor,
    chip: Chip,
    *,
    on_hopper: bool,
) -> None:
    """`mix` into `output` [P, H] of so many rows an expert that they are multiplied in tall blocks:
    on Hopper by a kernel that lays its own output out by blocks."""
    assert isinstance(up, Fp8), "what the kernels suit"
    assert isinstance(down, Fp8), "what the kernels suit"
    num_rows, size = experts.numel(), down.num_inputs
    groups, tall = group_many(experts, len(up.scales), triton_tall.BLOCK_M), triton_tall
    if on_hopper:
        from milepost.kernels.products.hopper import fp8_grouped_up as tall

        num_rows = groups.blocks.shape[1] * triton_tall.BLOCK_M
    active = rows.new_empty(num_rows, size, dtype=FP8)
    active_scales = rows.new_empty(size // BLOCK, num_rows, dtype=torch.float32)
    how = {"is_gated": up.num_outputs == 2 * size, "is_bfloat": rows.dtype == torch.bfloat16}
    values, scales = rounding.round_rows(rows, up, chip, are_few=False)
    assert scales is not None, "FP8 rounds its rows"
    tall.project_up(values, scales, up, active, active_scales, groups, chip, **how)
    tall.project_down(active, active_scales, shares, down, output, groups, chip)
