"""The gated delta rule in plain torch: the definition, on any device.

For each head, with state S [key_dim, value_dim] (Yang et al., Gated Delta Networks, arXiv
2412.06464, section 3; Kimi Linear, arXiv 2510.26692, section 3):

    S_t = D_t S_{t-1} + k_t (beta_t (v_t - (D_t S_{t-1})^T k_t))^T        out_t = S_t^T q_t

D_t is one decay for the head, or diagonal: a decay for each channel of a key. Keys and queries are
L2-normalised here, and queries scaled by key_dim ** -0.5. Sums are float32, or float64 for float64
inputs; states are cast from the pool's type when read and to it when written.

Slots: `slot_in` of several sequences may be the same slot (slot 0 holds zeros). A slot that is
written is read by no other sequence of the batch, and every state is read before any is written.

Legend: T tokens, D decoding sequences, S sequences, N chunks, C tokens in a chunk, G key heads, R
value heads for each key head, V = G * R value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkRows
from milepost.kernels.platform.tensors import accumulation_dtype, cast, read_slots, write_slots
from milepost.kernels.recurrent.reference.rows import Steps, carry_states

_NORM_EPS = 1e-6


def steps_of(
    prepare: Callable[..., Sequence[Tensor]],
    conv_weight: Tensor,
    split: Callable[[Tensor, Tensor], Sequence[Tensor]],
) -> Steps:
    """Returns the `Steps` of a convolution and the rule."""
    small = (conv_weight, None)
    return Steps(prepare=prepare, conv=small, split=split, decode=decode, prefill=prefill)


def decode(
    query_key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """Advances D sequences by one token each; returns [D, V, W] in `value`'s type and writes
    `pool`.

    `query_key` [D, 2, G, K], `value` [D, V, W], `log_decay` [D, V], or [D, V, K] where every
    channel of a key has its own, `beta` [D, V], `pool` [slots, V, K, W], `slot_in` and `slot_out`
    [D].
    """
    num_sequences, num_heads, value_dim = value.shape
    state = read_slots(pool, slot_in, slot_out, accumulation_dtype(value.dtype))
    state = state.view(num_sequences * num_heads, -1, value_dim)
    paired = _pair_heads(_normalise(query_key), num_heads)
    query, key = paired[:, 0], paired[:, 1]

    state.mul_(cast(log_decay, state.dtype).exp().reshape(len(state), -1, 1))
    read, remembered = torch.bmm(paired, state).unbind(1)
    wanted = cast(value.reshape(-1, value_dim), state.dtype)
    change = (wanted - remembered).mul_(beta.reshape(-1, 1))
    output = torch.addcmul(read, (query * key).sum(-1, keepdim=True), change)
    state.addcmul_(key[:, :, None], change[:, None, :])

    write_slots(pool, slot_out, state.view(-1, *pool.shape[1:]))
    return cast(output.view(value.shape), value.dtype)


def prefill(
    query_key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkRows,
) -> Tensor:
    """Advances S sequences by all their tokens; returns [T, V, W] in `value`'s type and writes
    `pool`.

    Arguments as for `decode`, with T tokens in place of D, `slot_in` and `slot_out` [S]. States
    that `layout` names as exports are written to their slots on the way. Everything inside a chunk
    is computed for all chunks at once, in the paper's chunkwise form (section 3.3); only the state
    goes from chunk to chunk.
    """
    wy_fwd = _wy_fwd if log_decay.dim() == 2 else _wy_fwd_by_channel
    chunks = wy_fwd(query_key, value, log_decay, beta, layout)
    return _chunk_fwd(chunks, pool, slot_in, slot_out, layout).to(value.dtype)


@dataclass(frozen=True, slots=True)
class ReferenceChunks:
    """All that a chunk needs besides the state before it; B = N * V chunk-heads."""

    queries: Tensor
    """[B, C, K], decayed from the chunk's begin."""
    keys: Tensor
    """[B, C, K], decayed to the chunk's end."""
    w: Tensor
    """[B, C, K], of the WY representation: times the state before the chunk, what u is less."""
    u: Tensor
    """[B, C, W], what each token adds for its key; at first as if the state before were zero."""
    scores: Tensor
    """[B, C, C], decayed products of queries and keys, zero above the diagonal."""
    decay: Tensor
    """[B, 1, 1] or [B, K, 1], decay over the whole chunk."""

    def advance(self, rows: slice, state: Tensor, output: Tensor) -> None:
        """Carries `state` [rows, K, W] over the chunks `rows`; changes it, `u` and `output`."""
        torch.bmm(self.queries[rows], state, out=output[rows])
        self.u[rows].baddbmm_(self.w[rows], state, alpha=-1)
        state.mul_(self.decay[rows]).baddbmm_(self.keys[rows].transpose(1, 2), self.u[rows])


def _chunk_fwd(
    chunks: ReferenceChunks, pool: Tensor, slot_in: Tensor, slot_out: Tensor, layout: ChunkRows
) -> Tensor:
    """Carries the states from chunk to chunk; returns the outputs [T, V, W] and writes `pool`,
    exports among its slots."""
    output = torch.empty_like(chunks.u)
    num_heads = pool.shape[1]

    def advance(first: int, size: int, state: Tensor) -> None:
        rows = slice(first * num_heads, (first + size) * num_heads)
        chunks.advance(rows, state.view(-1, *state.shape[2:]), output)

    carry_states(advance, pool, slot_in, slot_out, layout, chunks.u.dtype)
    output.baddbmm_(chunks.scores, chunks.u)
    output = output.view(-1, num_heads, layout.chunk, output.shape[-1]).transpose(1, 2)
    return output.flatten(0, 1).index_select(0, layout.rows)


def _wy_fwd(
    query_key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, layout: ChunkRows
) -> ReferenceChunks:
    """Computes what does not depend on the state, with one decay a head."""
    query, key = _chunked(_normalise(query_key), layout).unbind(2)  # [N, G, C, K]
    query, key = query[:, :, None], key[:, :, None]  # [N, G, 1, C, K]
    num_chunks, num_groups = key.shape[:2]

    def per_head(tensor: Tensor) -> Tensor:
        rows = _chunked(tensor.to(key.dtype), layout)
        return rows.view(num_chunks, num_groups, -1, *rows.shape[2:])

    is_token = layout.is_token[:, None, None]
    beta = per_head(beta).where(is_token, 0)[..., None]  # [N, G, R, C, 1]
    decay_sums = per_head(log_decay).where(is_token, 0).cumsum(-1)[..., None]
    above = torch.ones(layout.chunk, layout.chunk, dtype=torch.bool, device=key.device)
    pairwise = (decay_sums - decay_sums.mT).masked_fill_(above.triu_(1), -torch.inf).exp_()

    system = (key @ key.mT) * pairwise * beta
    sides = per_head(value) * beta, key * (beta * decay_sums.exp())
    return _solve(query, key, decay_sums, system, sides, (query @ key.mT) * pairwise)


def _wy_fwd_by_channel(
    query_key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, layout: ChunkRows
) -> ReferenceChunks:
    """Computes what does not depend on the state, with a decay for each channel of a key."""
    query, key = _chunked(_normalise(query_key), layout).unbind(2)  # [N, H, C, K]
    is_token = layout.is_token[:, None, :, None]
    beta = _chunked(beta.to(key.dtype), layout)[..., None].where(is_token, 0)
    decay_sums = _chunked(log_decay.to(key.dtype), layout)
    decay_sums = decay_sums.where(is_token, 0).cumsum(2)
    system, scores = (key.new_zeros(*key.shape[:3], layout.chunk) for _ in "kq")
    for token in range(layout.chunk):
        # No decay may be divided by: over a chunk it can be too small for a number.
        own, later = slice(token, token + 1), slice(token, None)
        since = (decay_sums[..., later, :] - decay_sums[..., own, :]).exp_() * key[..., own, :]
        system[..., later, token] = (key[..., later, :] * since).sum(-1)
        scores[..., later, token] = (query[..., later, :] * since).sum(-1)

    values = _chunked(value.to(key.dtype), layout)
    sides = values * beta, key * beta * decay_sums.exp()
    return _solve(query, key, decay_sums, system * beta, sides, scores)


def _solve(
    query: Tensor,
    key: Tensor,
    decay_sums: Tensor,
    system: Tensor,
    sides: tuple[Tensor, Tensor],
    scores: Tensor,
) -> ReferenceChunks:
    """Returns the chunks of unit queries and keys [N, ..., C, K], given the triangular system of
    what their tokens add, and its right sides for values and keys."""
    total = decay_sums[..., -1:, :]
    solution = torch.linalg.solve_triangular(
        system, torch.cat(sides, -1), upper=False, unitriangular=True
    )
    u, w = solution.flatten(0, -3).split([side.shape[-1] for side in sides], -1)
    return ReferenceChunks(
        queries=(query * decay_sums.exp()).flatten(0, -3),
        keys=(key * (total - decay_sums).exp()).flatten(0, -3),
        w=w,
        u=u.contiguous(),
        scores=scores.flatten(0, -3),
        decay=total.exp().flatten(0, -3).mT,
    )


def _chunked(tensor: Tensor, layout: ChunkRows) -> Tensor:
    """Cuts [T, *heads, ...] into chunks [N, *heads, C, ...]: the token axis moves after the head
    axes.

    [T, 2, G, K] becomes [N, G, 2, C, K]; [T, V, W] becomes [N, V, C, W]; [T, V] becomes [N, V, C].
    """
    rows = tensor.index_select(0, layout.tokens.flatten())
    rows = rows.view(*layout.tokens.shape, *tensor.shape[1:])
    if tensor.dim() == 4:
        return rows.permute(0, 3, 2, 1, 4)
    return rows.transpose(1, 2).contiguous()


def _normalise(query_key: Tensor) -> Tensor:
    """Returns unit queries and keys [T, 2, G, K], queries scaled by K ** -0.5."""
    wide = cast(query_key, accumulation_dtype(query_key.dtype))
    length = wide.square().sum(-1, keepdim=True).add_(_NORM_EPS).rsqrt_()
    length[:, 0].mul_(query_key.shape[-1] ** -0.5)
    return wide * length


def _pair_heads(query_key: Tensor, num_heads: int) -> Tensor:
    """Repeats [D, 2, G, K] as [D * V, 2, K]: the query and key of each value head. Those of one key
    head stand side by side."""
    num_sequences, _, groups, key_dim = query_key.shape
    shared = query_key.transpose(1, 2)[:, :, None]
    shared = shared.expand(num_sequences, groups, num_heads // groups, 2, key_dim)
    return shared.reshape(num_sequences * num_heads, 2, key_dim)
