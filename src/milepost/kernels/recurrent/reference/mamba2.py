"""Mamba2's recurrence (SSD) in plain torch: the definition, on any device.

For each head, with state S [head_dim, state_size] (Dao and Gu, Transformers are SSMs, arXiv
2405.21060, sections 2 and 6):

    S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T        y_t = S_t C_t + D * x_t

B and C are shared by the heads of a group. Sums are float32, or float64 for float64 inputs; states
are cast from the pool's type when read and to it when written.

Slots: `slot_in` of several sequences may be the same slot (slot 0 holds zeros). A slot that is
written is read by no other sequence of the batch, and every state is read before any is written.

Legend: T tokens, D decoding sequences, S sequences, n sequences of a step, L tokens in a chunk, H
heads, P head_dim, G groups, R = H / G heads of a group, N state_size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkRows
from milepost.kernels.platform.tensors import (
    accumulation_dtype,
    cast,
    read_slots,
    rows_apart,
    write_slots,
)
from milepost.kernels.recurrent.mixer import Mamba2Weights, MixerSizes
from milepost.kernels.recurrent.reference.rows import MixerRows, Steps, carry_states, run
from milepost.kernels.recurrent.structures import LayerStates


def mix(
    sizes: MixerSizes,
    projected: Tensor,
    weights: Mamba2Weights,
    states: LayerStates,
    rows: MixerRows,
) -> Tensor:
    """See `RecurrentOperation.mix`."""
    gate, *inputs = projected.split((sizes.width, sizes.channels, sizes.heads), -1)
    small = weights.rate, weights.skip
    steps = Steps(
        prepare=partial(_prepare, weights),
        conv=(weights.conv, weights.conv_bias),
        split=_split,
        decode=partial(decode, small=small),
        prefill=partial(prefill, small=small),
    )
    output = run(steps, inputs, states, rows)
    return cast(gated_norm(sizes, output.flatten(1), gate, weights), projected.dtype)


def _prepare(weights: Mamba2Weights, mixed: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the convolution's inputs, and time steps [T, H]. These are bounded where a sequence
    decodes too: a state must not depend on who made it."""
    rate = weights.rate
    wide = torch.add(inputs, weights.dt_bias, out=rows_apart(rate, len(inputs), len(rate)))
    return mixed, F.softplus(wide).clamp_(*weights.dt_limit)


def _split(inputs: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [T, H, P], B and C [T, 2, G, N]."""
    _, heads, head_dim, state_size = recurrent_pool.shape
    x, b_c = inputs.tensor_split((heads * head_dim,), -1)
    return x.unflatten(-1, (heads, head_dim)), b_c.unflatten(-1, (2, -1, state_size))


def gated_norm(sizes: MixerSizes, hidden: Tensor, gate: Tensor, weights: Mamba2Weights) -> Tensor:
    """Multiplies `hidden` [T, H * P] by SiLU of `gate`, and norms it group by group after that or
    before it."""
    gate = F.silu(cast(gate, hidden.dtype))
    if weights.norm is None:
        return hidden * gate
    if sizes.gates_first:
        hidden = hidden * gate
    grouped = hidden.unflatten(-1, (sizes.units, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=weights.norm_eps).flatten(1)
    normed = normed.mul_(weights.norm)
    return normed if sizes.gates_first else normed.mul_(gate)


def decode(
    x: Tensor,
    b_c: Tensor,
    dt: Tensor,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    *,
    small: tuple[Tensor, Tensor],
) -> Tensor:
    """Advances D sequences by one token each; returns [D, H, P] in the type of sums and writes
    `pool`.

    `x` [D, H, P], `b_c` [D, 2, G, N], time steps `dt` [D, H], `pool` [slots, H, P, N], `slot_in`
    and `slot_out` [D], `small` the published A [H] and D [H].
    """
    rate, skip = small
    heads, dtype = x.shape[1], accumulation_dtype(x.dtype)
    x, dt = cast(x, dtype), cast(dt, dtype)
    b, c = (
        cast(each, dtype).repeat_interleave(heads // each.shape[1], 1) for each in b_c.unbind(1)
    )
    state = read_slots(pool, slot_in, slot_out, dtype)
    state.mul_((dt * rate).exp_()[..., None, None])
    state.addcmul_((x * dt[..., None])[..., None], b[:, :, None])
    write_slots(pool, slot_out, state)
    return torch.matmul(state, c[..., None]).squeeze(-1).add_(x * skip[:, None])


def prefill(
    x: Tensor,
    b_c: Tensor,
    dt: Tensor,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkRows,
    *,
    small: tuple[Tensor, Tensor],
) -> Tensor:
    """Advances S sequences by all their tokens; returns [T, H, P] in the type of sums and writes
    `pool`.

    Arguments as for `decode`, with T tokens in place of D, `slot_in` and `slot_out` [S]. States
    that `layout` names as exports are written to their slots on the way.
    """
    (rate, skip), (b, c), dtype = small, b_c.unbind(1), accumulation_dtype(x.dtype)
    output = x.new_empty(x.shape, dtype=dtype)

    def advance(first: int, size: int, state: Tensor) -> None:
        rows, is_token = (each[first : first + size] for each in (layout.tokens, layout.is_token))
        own_x, own_b, own_c = (each[rows].to(dtype) for each in (x, b, c))
        steps = dt[rows].to(dtype).masked_fill_(~is_token[..., None], 0)
        output[rows[is_token]] = _advance(own_x, own_b, own_c, steps, rate, state)[is_token]

    carry_states(advance, pool, slot_in, slot_out, layout, dtype)
    return output.addcmul_(x.to(dtype), skip[:, None])


def _advance(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """Carries `state` [n, H, P, N] over one chunk each, in place; returns what is read, [n, L, H,
    P].

    `x` [n, L, H, P], `b` and `c` [n, L, G, N]; `dt` [n, L, H] is 0 for what is no token.
    """
    groups = (b.shape[2], -1)
    b, c = b.transpose(1, 2)[:, :, None], c.transpose(1, 2)[:, :, None]  # [n, G, 1, L, N]
    written: Tensor = (x * dt[..., None]).transpose(1, 2).unflatten(1, groups)  # [n, G, R, L, P]
    before = state.unflatten(1, groups)
    sums = (dt * rate).cumsum(1).transpose(1, 2).unflatten(1, groups)[..., None]  # [n, G, R, L, 1]
    total = sums[..., -1:, :]
    above = torch.ones(sums.shape[-2], sums.shape[-2], dtype=torch.bool, device=x.device).triu_(1)
    scores = (sums - sums.mT).masked_fill_(above, -torch.inf).exp_().mul_(c @ b.mT)
    output = scores @ written
    output.add_((c @ before.mT).mul_(sums.exp()))
    before.mul_(total.exp()).add_((written * (total - sums).exp()).mT @ b)
    read: Tensor = output.flatten(1, 2).transpose(1, 2)
    return read
