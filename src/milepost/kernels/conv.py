"""Causal depthwise short convolution over pools of states, in plain torch: the definition, on any
device. `prefill` and `decode` end with SiLU; `convolve` leaves it out.

    out_t = silu(bias + sum_j weight[:, j] * x_{t - (J - 1) + j})        j = 0 .. J - 1

A sequence's state is its last J - 1 inputs, oldest first; what precedes a fresh sequence is zeros
(slot 0). Slots follow the rule of every recurrent kernel: read before any is written, and never
written while another sequence reads them.

Legend: T tokens, D decoding sequences, S sequences, E exports, C channels, J taps (kernel size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tensors import accumulation_dtype, cast, rows_apart, write_slots

__all__ = ["ConvLayout", "convolve", "decode", "extend", "lay_out_windows", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayout:
    """Rows of the extended input, which has J - 1 rows of state per sequence and then its
    tokens."""

    windows: Tensor
    """[T] int64, row at which each token's window of J rows begins."""
    before: Tensor
    """[S, J - 1] int64, rows of the states that are read."""
    kept: Tensor
    """[S + E, J - 1] int64, rows of the states that are written: the final ones, then the
    exports."""
    export_slots: Tensor
    """[E] int64, slots of the exports."""


def lay_out_windows(
    starts: Sequence[int],
    lengths: Sequence[int],
    exports: Sequence[tuple[int, int, int]],
    conv_width: int,
    device: torch.device | str = "cpu",
) -> ConvLayout:
    """Places sequences of `lengths` tokens that begin at positions `starts`.

    `exports` are (sequence, position, slot) with start < position <= start + length.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    taps = torch.arange(conv_width - 1)
    shift = torch.arange(len(lengths)) * (conv_width - 1)
    first = length.cumsum(0) - length + shift
    consumed = torch.tensor(
        [position - starts[sequence] for sequence, position, _ in exports], dtype=torch.int64
    )
    owners = torch.tensor([sequence for sequence, _, _ in exports], dtype=torch.int64)
    ends = torch.cat((first + length, first[owners] + consumed))
    return ConvLayout(
        windows=(shift.repeat_interleave(length) + torch.arange(sum(lengths))).to(device),
        before=(first[:, None] + taps).to(device),
        kept=(ends[:, None] + taps).to(device),
        export_slots=torch.tensor([slot for _, _, slot in exports], dtype=torch.int64).to(device),
    )


def decode(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """Advances D sequences by one token each; returns [D, C] in `inputs`' type and writes `pool`.

    `inputs` [D, C], `weight` [C, J], `bias` [C], `pool` [slots, C, J - 1], `slot_in` and `slot_out`
    [D].
    """
    before = pool.index_select(0, slot_in)
    write_slots(pool, slot_out, _shifted(before, inputs))
    dtype = accumulation_dtype(inputs.dtype)
    before, taps = cast(before, dtype), cast(weight, dtype).unbind(1)
    output = rows_apart(taps[-1], *inputs.shape)
    torch.mul(cast(inputs, dtype), taps[-1], out=output)
    for index, tap in enumerate(taps[:-1]):
        output.addcmul_(before[:, :, index], tap)
    if bias is not None:
        output += bias
    return cast(F.silu(output, inplace=True), inputs.dtype)


def _shifted(before: Tensor, inputs: Tensor) -> Tensor:
    """Returns the last J - 1 inputs after one more: `before` [D, C, J - 1], `inputs` [D, C].

    Copies the whole memory shifted by one element, and then fills in the newest inputs.
    """
    after = torch.empty_like(before)
    after.flatten(1)[:, :-1] = before.flatten(1)[:, 1:]
    after[:, :, -1] = inputs
    return after


def prefill(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ConvLayout,
) -> Tensor:
    """Advances S sequences by all their tokens; returns [T, C] in `inputs`' type and writes `pool`.

    Arguments as for `decode`, with T tokens in place of D, `slot_in` and `slot_out` [S]. States
    that `layout` names as exports are written too.
    """
    extended = extend(inputs, pool.index_select(0, slot_in).transpose(1, 2), layout)
    targets = torch.cat((slot_out, layout.export_slots))
    write_slots(pool, targets, extended[layout.kept].transpose(1, 2))
    output = convolve(extended, weight, bias, layout)
    return cast(F.silu(output, inplace=True), inputs.dtype)


def extend(inputs: Tensor, before: Tensor, layout: ConvLayout) -> Tensor:
    """Returns the extended input: states `before` [S, J - 1, C], each followed by its sequence's
    tokens of `inputs` [T, C]."""
    num_taps = before.shape[1]
    extended = inputs.new_empty(len(inputs) + layout.before.numel(), inputs.shape[1])
    extended[layout.before] = before.to(inputs.dtype)
    return extended.index_copy_(0, layout.windows + num_taps, inputs)


def convolve(extended: Tensor, weight: Tensor, bias: Tensor | None, layout: ConvLayout) -> Tensor:
    """Returns the tokens' sums [T, C], before SiLU, in the type of sums."""
    dtype = accumulation_dtype(extended.dtype)
    extended, taps = cast(extended, dtype), cast(weight, dtype).unbind(1)
    num_windows = len(extended) - len(taps) + 1
    output = rows_apart(extended, num_windows, extended.shape[1])
    torch.mul(extended[:num_windows], taps[0], out=output)
    for offset, tap in enumerate(taps[1:], start=1):
        output.addcmul_(extended[offset : offset + num_windows], tap)
    if bias is not None:
        output += bias
    return output.index_select(0, layout.windows)
