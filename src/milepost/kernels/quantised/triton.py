"""Which kernel multiplies quantised weights on a GPU, and how it is cut up.

Legend: T tokens, I inputs, O outputs, S splits along I, X experts, N experts of a token, P = T * N
routed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from milepost.kernels.device import Chip, probe
from milepost.kernels.moe.grouping import group_few, group_many
from milepost.kernels.quantised import triton_fp8
from milepost.kernels.quantised.forms import BLOCK, Fp8, Int4, Quantised
from milepost.kernels.tiles import Tiles

_FEW = Tiles(block_m=16, block_n=64, block_k=BLOCK, num_warps=4, num_stages=6)
_SOME = Tiles(block_m=32, block_n=64, block_k=BLOCK, num_warps=4, num_stages=6)
_MORE = Tiles(block_m=64, block_n=64, block_k=BLOCK, num_warps=4, num_stages=5)
_MANY = Tiles(block_m=128, block_n=128, block_k=BLOCK, num_warps=8, num_stages=4)
_REGIMES = (_FEW, _SOME, _MORE)
_MANY_ROUTED = 6144
"""Beyond this many two more launches to group them pay."""


def partials(
    hidden: Tensor, weight: Quantised, bias: Tensor | None, *, lets_next_start: bool
) -> Tensor | None:
    """`hidden` [T, I] times `weight` [O, I], plus `bias` [O]: [T, O], or float32 partials
    [T, S, O]; None where there is no kernel for it."""
    if isinstance(weight, Int4) or not _suits(hidden, weight):
        return None
    num_tokens, num_outputs = len(hidden), weight.values.shape[0]
    if num_tokens == 0:
        return hidden.new_empty(0, num_outputs)
    chip = probe(hidden.device)
    tiles = _choose(num_tokens).fitted(chip)
    rows, scales = hidden, None
    if tiles.block_m > _FEW.block_m or weight.depth != BLOCK or weight.input_scale is not None:
        rows, scales = triton_fp8.quantise(hidden, weight, chip)
    split_k = _choose_split(num_tokens, num_outputs, hidden.shape[1], tiles, chip)
    if split_k == 1:
        output = hidden.new_empty(num_tokens, num_outputs)
    else:
        output = hidden.new_empty(split_k, num_tokens, num_outputs, dtype=torch.float32)
    triton_fp8.gemm(
        rows, scales, weight, bias, output, tiles, chip, split_k=split_k, overlaps=lets_next_start
    )
    return output if split_k == 1 else output.transpose(0, 1)


def _suits(hidden: Tensor, *weights: Fp8) -> bool:
    """16-bit activations with contiguous rows, and whole blocks of inputs."""
    is_whole = all(weight.num_inputs % BLOCK == 0 for weight in weights)
    return hidden.element_size() == 2 and hidden.stride(-1) == 1 and is_whole


def _choose(num_rows: float) -> Tiles:
    return next((tiles for tiles in _REGIMES if num_rows <= tiles.block_m), _MANY)


def _choose_split(
    num_tokens: int, num_outputs: int, num_inputs: int, tiles: Tiles, chip: Chip
) -> int:
    """Until there is a program for nearly each multiprocessor; partials of many rows would cost
    more than they gain."""
    programs = triton.cdiv(num_outputs, tiles.block_n) * triton.cdiv(num_tokens, tiles.block_m)
    split_k, wanted = 1, 1 << (chip.num_sms.bit_length() - 1)
    if num_tokens > _MORE.block_m or num_inputs % BLOCK:
        return 1
    while programs * split_k < wanted and num_inputs >= 4 * split_k * BLOCK:
        split_k *= 2
    return split_k


def mix(
    hidden: Tensor, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised
) -> Tensor | None:
    """A partial for each routed token: [T, N, H], in `hidden`'s type; None where there is no kernel
    for it."""
    if isinstance(up, Int4) or isinstance(down, Int4) or not _suits(hidden, up, down):
        return None
    num_experts, num_rows, _ = up.values.shape
    size = down.num_inputs
    if num_rows != 2 * size or up.input_scale is not None:
        return None
    num_tokens, num_chosen = experts.shape
    num_routed, chip = experts.numel(), probe(hidden.device)
    tiles = _choose(num_routed / num_experts).fitted(chip)
    group = group_many if num_routed > _MANY_ROUTED else group_few
    groups = group(experts, num_experts, tiles.block_m)
    active = hidden.new_empty(num_routed, size)
    output = hidden.new_empty(num_tokens, num_chosen, down.values.shape[1])
    is_rounded = tiles.block_m > _FEW.block_m or up.depth != BLOCK
    rows, scales = triton_fp8.quantise(hidden, up, chip) if is_rounded else (hidden, None)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    narrow = replace(tiles, block_n=64)
    triton_fp8.project_up(rows, scales, up, active, groups, narrow, chip)
    rows, scales = triton_fp8.quantise(active, down, chip) if is_rounded else (active, None)
    triton_fp8.project_down(rows, scales, shares, down, output, groups, tiles, chip)
    return output
