"""Which kernel multiplies quantised weights on a GPU, and how it is cut up.

Legend: T tokens, I inputs, O outputs, S splits along I, X experts, N experts of a token, P = T * N
routed tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import moe
from milepost.kernels.device import Chip, probe, runs_gluon
from milepost.kernels.moe.grouping import MANY_ROUTED, Groups, group_few, group_many
from milepost.kernels.quantised import (
    triton_experts,
    triton_gemm,
    triton_gemv,
    triton_gemv_experts,
    triton_rounding,
    triton_tall,
    triton_unpack,
)
from milepost.kernels.quantised.forms import BLOCK, FP8, FourBits, Fp4, Fp8, Int4, Quantised
from milepost.kernels.quantised.rounded import LINE, find
from milepost.kernels.tiles import Tiles, cdiv, choose_split_k

if TYPE_CHECKING:
    from milepost.kernels.quantised.triton_hopper_nibble_rows import NibbleTiles
    from milepost.kernels.quantised.triton_hopper_rows import RowTiles

_FEW = Tiles(block_m=16, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
_SOME = Tiles(block_m=32, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
_MORE = Tiles(block_m=64, block_n=128, block_k=BLOCK, num_warps=4, num_stages=4)
_MANY = Tiles(block_m=128, block_n=128, block_k=BLOCK, num_warps=8, num_stages=4)
_REGIMES = (_FEW, _SOME, _MORE)
_OF_TENSOR_MEMORY = {_MORE: replace(_MORE, num_warps=8), _MANY: replace(_MANY, block_n=64)}
"""On sm_100 a step's products come from tensor memory to be scaled: with the other tiles a thread
of a GEMM spills 650 to 1,200 bytes there, with these none."""
_FOUR_BIT_WARPS = 8
"""Numbers of four bits take work in registers, which is spread over more threads."""
_HOPPER_WEIGHTS = 1 << 22
"""Weights at least of products of some rows that Hopper's own kernel is fastest for."""
_FEWEST_ROUTED = 40
"""Up to this many routed tokens nothing is grouped."""
_LIBRARY_ROWS = 64
"""From so many rows on torch's GEMM is as fast as ours, or it is faster to dequantise a matrix."""
_TOKENS_AT_ONCE = 64
"""Up to this many tokens Hopper multiplies experts in one launch."""
_FEW_NIBBLES = 12
"""Beyond so many routed tokens an expert Hopper multiplies four-bit weights in tall blocks (9 take
249 us, 229 otherwise; 18 take 255 and 346)."""
_TALL_ROUTED, _UNPACKED_ROUTED = 32, 112
"""Beyond so many routed tokens an expert the GEMMs are bound by arithmetic; or it is faster to make
16-bit weights of four bits first."""


def multiply(
    hidden: Tensor, weight: Quantised, bias: Tensor | None, *, lets_next_start: bool
) -> Tensor | None:
    """`hidden` [T, I] times `weight` [O, I], plus `bias` [O]: [T, O], or float32 partials
    [T, S, O]; None where there is no kernel for it."""
    if not _suits(hidden, weight):
        return None
    num_tokens, num_outputs = len(hidden), weight.num_outputs
    if num_tokens == 0:
        return hidden.new_empty(0, num_outputs)
    chip = probe(hidden.device)
    if num_tokens > _LIBRARY_ROWS:
        if isinstance(weight, FourBits):
            product = F.linear(hidden, triton_unpack.unpack(weight, hidden.dtype))
            return product if bias is None else product.add_(bias)
        if _library_multiplies(weight, chip):
            return _multiply_by_library(hidden, weight, bias, chip)
    split_k = 1
    if cut := _cut_for_hopper(hidden, weight, bias, chip):
        split_k = cut.split_k
    elif num_tokens <= _MORE.block_m and not _is_row(hidden, weight):
        tiles = _choose_dense(num_tokens, weight, chip)
        split_k = choose_split_k(num_outputs, hidden.shape[1], tiles, chip.num_sms)
    output = _new_output(hidden, num_outputs, split_k)
    _multiply(output, hidden, weight, bias, chip, overlaps=lets_next_start)
    return output if split_k == 1 else output.transpose(0, 1)


def _new_output(hidden: Tensor, num_outputs: int, split_k: int) -> Tensor:
    """[T, O], or partials [S, T, O]."""
    if split_k == 1:
        return hidden.new_empty(len(hidden), num_outputs)
    return hidden.new_empty(split_k, len(hidden), num_outputs, dtype=torch.float32)


def multiply_of_gated(gate_up: Tensor, weight: Quantised) -> Tensor | None:
    """`multiply` of SiLU(first half) * second half of `gate_up` [T, 2 * I], rounded as it is made;
    None where no kernel does it."""
    if not isinstance(weight, Fp8) or not _suits(gate_up, weight) or len(gate_up) < 2:
        return None
    chip = probe(gate_up.device)
    if len(gate_up) > _LIBRARY_ROWS:
        if not _library_multiplies(weight, chip):
            return None
        return _multiply_by_library(gate_up, weight, None, chip, is_gated=True)
    cut = _cut_for_hopper(gate_up, weight, None, chip)
    if cut is None:
        return None
    output = _new_output(gate_up, weight.num_outputs, cut.split_k)
    _multiply(output, gate_up, weight, None, chip, overlaps=True, is_gated=True)
    return output if cut.split_k == 1 else output.transpose(0, 1)


def multiply_into(
    output: Tensor, hidden: Tensor, weight: Quantised, bias: Tensor | None, *, lets_next_start: bool
) -> bool:
    """Whether a kernel made `output` [T, O], whose rows may lie apart, the product."""
    if not _suits(hidden, weight) or len(hidden) == 0:
        return False
    chip = probe(hidden.device)
    if len(hidden) <= _LIBRARY_ROWS:
        _multiply(output, hidden, weight, bias, chip, overlaps=lets_next_start)
        return True
    if not isinstance(weight, Fp8) or not _library_multiplies(weight, chip) or len(hidden) % LINE:
        return False
    _multiply_by_library(hidden, weight, bias, chip, output)
    return True


def multiply_beside(output: Tensor, hidden: Tensor, weight: Quantised, raw: Tensor) -> bool:
    """Whether one launch made `output` [T, O + R] what `weight` [O, I] and `raw` [R, I] make of
    `hidden`."""
    if not _suits(hidden, weight) or not isinstance(weight, Fp8):
        return False
    chip = probe(hidden.device)
    cut = _cut_for_hopper(hidden, weight, None, chip)
    if cut is None:
        return False
    from milepost.kernels.quantised import triton_hopper_rows
    from milepost.kernels.quantised.beside_gluon import Beside

    beside = Beside(rows=hidden, weight=raw)
    if not beside.is_small:
        return False
    rows, scales = _round_lines(hidden, weight, chip, is_gated=False)
    cut = replace(cut, split_k=1)
    triton_hopper_rows.multiply(rows, scales, weight, output, cut, chip, beside)
    return True


def multiply_gated(hidden: Tensor, weight: Quantised) -> Tensor | None:
    """SiLU(gate) * up [T, O] of `hidden` [T, I] and `weight` [2 * O, I], whose first half are the
    gates, if one launch does it, else None."""
    if not (_suits(hidden, weight) and _is_row(hidden, weight) and _runs_gluon(hidden, weight)):
        return None
    if weight.num_outputs % 2:
        return None
    output = hidden.new_empty(1, weight.num_outputs // 2)
    _multiply_row(output, hidden, weight, None, probe(hidden.device), is_gated=True)
    return output


def _multiply_row(
    output: Tensor,
    hidden: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """`output` [1, O] by Hopper's own kernels."""
    from milepost.kernels.quantised import triton_hopper_ring, triton_hopper_row

    if isinstance(weight, Fp8) and triton_hopper_ring.suits(weight):
        triton_hopper_ring.multiply(hidden, weight, bias, output, chip, is_gated=is_gated)
    else:
        triton_hopper_row.multiply(hidden, weight, bias, output, chip, is_gated=is_gated)


def _multiply(
    output: Tensor,
    hidden: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    chip: Chip,
    *,
    overlaps: bool,
    is_gated: bool = False,
) -> None:
    """`output` [T, O], or partials [S, T, O], by our kernels; where it `is_gated`, of SiLU of the
    first half of `hidden` [T, 2 * I] times the second."""
    split_k = len(output) if output.dim() == 3 else 1
    if cut := _cut_for_hopper(hidden, weight, bias, chip):
        cut = replace(cut, split_k=split_k)
        _multiply_rows(output, hidden, weight, cut, chip, is_gated=is_gated)
        return
    assert not is_gated, "of rows that Hopper's kernel takes"
    if _is_row(hidden, weight):
        if _runs_gluon(hidden, weight):
            _multiply_row(output, hidden, weight, bias, chip, is_gated=False)
        else:
            triton_gemv.multiply(hidden, weight, bias, output, chip)
        return
    tiles = _choose_dense(len(hidden), weight, chip)
    are_few = tiles.block_m <= _FEW.block_m
    rows, scales = _round(hidden, weight, chip, are_few=are_few)
    triton_gemm.gemm(
        rows, scales, weight, bias, output, tiles, chip, split_k=split_k, overlaps=overlaps
    )


def _cut_for_hopper(
    hidden: Tensor, weight: Quantised, bias: Tensor | None, chip: Chip
) -> RowTiles | NibbleTiles | None:
    """How Hopper's own kernel cuts the product up; None where it does not do it."""
    if _is_row(hidden, weight) or bias is not None or not _runs_gluon(hidden, weight):
        return None
    if isinstance(weight, Int4):
        from milepost.kernels.quantised import triton_hopper_nibble_rows

        return triton_hopper_nibble_rows.find_tiles(hidden, weight, chip)
    if weight.num_outputs * weight.num_inputs < _HOPPER_WEIGHTS:
        return None
    from milepost.kernels.quantised import triton_hopper_rows

    return triton_hopper_rows.find_tiles(len(hidden), weight, chip)


def _multiply_rows(
    output: Tensor,
    hidden: Tensor,
    weight: Quantised,
    cut: RowTiles | NibbleTiles,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """`_multiply` by Hopper's own kernels, cut up so."""
    from milepost.kernels.quantised import triton_hopper_nibble_rows, triton_hopper_rows

    if isinstance(cut, triton_hopper_nibble_rows.NibbleTiles):
        assert isinstance(weight, Int4), "the form that is cut so"
        triton_hopper_nibble_rows.multiply(hidden, weight, output, cut)
        return
    assert isinstance(weight, Fp8), "the form that is cut so"
    rows, scales = _round_lines(hidden, weight, chip, is_gated=is_gated)
    triton_hopper_rows.multiply(rows, scales, weight, output, cut, chip)


def _is_row(hidden: Tensor, weight: Quantised) -> bool:
    """Whether it is one row, and matrix-vector products are made of the weight."""
    return len(hidden) == 1 and triton_gemv.suits(weight)


def _runs_gluon(hidden: Tensor, *weights: Quantised) -> bool:
    """Whether Hopper's own kernels run, which know no e2m1."""
    return runs_gluon(hidden) and not any(isinstance(weight, Fp4) for weight in weights)


def _suits(hidden: Tensor, *weights: Quantised) -> bool:
    """16-bit activations with contiguous rows, and whole blocks of inputs."""
    is_whole = all(weight.num_inputs % BLOCK == 0 for weight in weights)
    return hidden.element_size() == 2 and hidden.stride(-1) == 1 and is_whole


def _library_multiplies(weight: Fp8, chip: Chip) -> bool:
    """Whether torch's GEMM takes these blocks: on Hopper alone, and whole lines of scales."""
    is_block = weight.rows == weight.depth == BLOCK
    is_whole = weight.num_inputs % (4 * BLOCK) == 0 and weight.num_outputs % 16 == 0
    return is_block and is_whole and chip.capability == (9, 0) and chip.arch != "cpu"


def _multiply_by_library(
    hidden: Tensor,
    weight: Fp8,
    bias: Tensor | None,
    chip: Chip,
    output: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    """The product, in `output` if it is given and rows are whole lines of four."""
    num_tokens = len(hidden)
    values, scales = _round_lines(hidden, weight, chip, is_gated=is_gated)
    if output is None or num_tokens != len(values):
        output = hidden.new_empty(len(values), weight.num_outputs)
    torch._scaled_mm(
        values,
        weight.values.t(),
        scales.t(),
        weight.scales.t(),
        out_dtype=hidden.dtype,
        out=output,
    )
    product = output[:num_tokens]
    return product if bias is None else product.add_(bias)


def _round_lines(
    hidden: Tensor, weight: Fp8, chip: Chip, *, is_gated: bool
) -> tuple[Tensor, Tensor]:
    """Rounded rows, unfilled ones behind some to whole lines, and their scales."""
    if not is_gated and weight.depth == BLOCK and (rounded := find(hidden)):
        return rounded.values, rounded.scales
    num_padded = cdiv(len(hidden), LINE) * LINE if len(hidden) > 1 else 1
    return triton_rounding.quantise(
        hidden, weight.depth, chip, num_padded=num_padded, is_gated=is_gated
    )


def _choose(num_rows: float, weight: Quantised) -> Tiles:
    tiles = next((tiles for tiles in _REGIMES if num_rows <= tiles.block_m), _MANY)
    if isinstance(weight, Fp8) or tiles == _MANY:
        return tiles
    return replace(tiles, num_warps=_FOUR_BIT_WARPS)


def _choose_dense(num_rows: int, weight: Quantised, chip: Chip) -> Tiles:
    tiles = _choose(num_rows, weight)
    if chip.capability[0] == 10:
        tiles = _OF_TENSOR_MEMORY.get(tiles, tiles)
    return tiles.fitted(chip)


def _round(
    hidden: Tensor, weight: Quantised, chip: Chip, *, are_few: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows as a GEMM takes them: few are rounded on the way, of more each program would round the
    same ones again."""
    if not isinstance(weight, Fp8):
        return hidden, None
    if weight.input_scale is not None or (are_few and weight.depth == BLOCK):
        return hidden, None
    if weight.depth == BLOCK and (rounded := find(hidden)):
        return rounded.of(len(hidden))
    return triton_rounding.quantise(hidden, weight.depth, chip)


def mix(
    hidden: Tensor, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised
) -> Tensor | None:
    """A partial for each routed token: [T, N, H], in `hidden`'s type; None where there is no kernel
    for it."""
    if not _suits(hidden, up, down):
        return None
    num_tokens, num_chosen = experts.shape
    num_experts, size = len(up.scales), down.num_inputs
    num_routed, chip = experts.numel(), probe(hidden.device)
    is_gated = up.num_outputs == 2 * size
    output = hidden.new_empty(num_tokens, num_chosen, down.num_outputs)
    if num_routed <= _FEWEST_ROUTED and triton_gemv.suits(up, down):
        if _runs_gluon(hidden, up, down):
            from milepost.kernels.quantised import triton_hopper_row_experts

            return triton_hopper_row_experts.mix(hidden, shares, experts, up, down, chip)
        active = hidden.new_empty(num_routed, size)
        triton_gemv_experts.project_up(hidden, experts, up, active, chip, is_gated=is_gated)
        triton_gemv_experts.project_down(active, shares, experts, down, output, chip)
        return output
    if runs_gluon(hidden) and num_tokens <= _TOKENS_AT_ONCE:
        from milepost.kernels.quantised import triton_hopper_experts

        if triton_hopper_experts.suits(up, down):
            assert isinstance(up, Fp8), "what the kernel suits"
            assert isinstance(down, Fp8), "what the kernel suits"
            rows, scales = _round_lines(hidden, up, chip, is_gated=False)
            triton_hopper_experts.mix(rows, scales, shares, experts, up, down, output, chip)
            return output
    if runs_gluon(hidden) and _mix_nibbles(hidden, shares, experts, up, down, output, chip):
        return output
    if num_routed > _TALL_ROUTED * num_experts and triton_tall.suits(chip, up, down):
        _mix_tall(hidden, shares, experts, up, down, output, chip)
        return output
    if num_routed > _UNPACKED_ROUTED * num_experts and isinstance(up, FourBits):
        assert isinstance(down, FourBits), "experts have one form"
        wide = [triton_unpack.unpack(each, hidden.dtype) for each in (up, down)]
        return moe.partials(hidden, shares, experts, *wide)
    tiles = _choose(num_routed / num_experts, up).fitted(chip)
    groups: Groups | Tensor = experts
    are_few = num_routed <= _FEWEST_ROUTED
    if not are_few:
        group = group_many if num_routed > MANY_ROUTED else group_few
        groups = group(experts, num_experts, tiles.block_m)
    active = hidden.new_empty(num_routed, size)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    narrow = replace(tiles, block_n=64, num_warps=8 if tiles.block_m == _MANY.block_m else 4)
    rows, scales = _round(hidden, up, chip, are_few=are_few)
    triton_experts.project_up(rows, scales, up, active, groups, narrow, chip, is_gated=is_gated)
    rows, scales = _round(active, down, chip, are_few=are_few)
    last = narrow if isinstance(down, FourBits) and tiles.block_m < _MANY.block_m else tiles
    triton_experts.project_down(rows, scales, shares, down, output, groups, last, chip)
    return output


def _mix_nibbles(
    hidden: Tensor,
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
    from milepost.kernels.quantised import triton_hopper_nibbles as few
    from milepost.kernels.quantised import triton_hopper_nibbles_tall as many

    assert isinstance(down, Int4), "experts have one form"
    num_rows = experts.numel() / len(up.scales)
    if num_rows > _FEW_NIBBLES and many.suits(hidden, up, down):
        many.mix(hidden, shares, experts, up, down, output, chip, many.choose_rows(num_rows))
    elif num_rows <= few.BLOCK_M and few.suits(hidden, up, down):
        few.mix(hidden, shares, experts, up, down, output)
    else:
        return False
    return True


def _mix_tall(
    hidden: Tensor,
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
    if runs_gluon(hidden):
        from milepost.kernels.quantised import triton_tall_hopper as tall

        num_rows = groups.blocks.shape[1] * triton_tall.BLOCK_M
    active = hidden.new_empty(num_rows, size, dtype=FP8)
    active_scales = hidden.new_empty(size // BLOCK, num_rows, dtype=torch.float32)
    how = {"is_gated": up.num_outputs == 2 * size, "is_bfloat": hidden.dtype == torch.bfloat16}
    rows, scales = _round(hidden, up, chip, are_few=False)
    assert scales is not None, "FP8 rounds its rows"
    tall.project_up(rows, scales, up, active, active_scales, groups, chip, **how)
    tall.project_down(active, active_scales, shares, down, output, groups, chip)
