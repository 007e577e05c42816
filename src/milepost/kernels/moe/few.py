"""Triton: the experts' GEMMs for so few tokens that one tile has a row for each of them.

An expert that was chosen is multiplied with all tokens, which takes no longer than reading its
weights, and what was not asked for is dropped. So routed tokens are not grouped first: each program
looks for its expert's. The up projection has programs for every expert, and those of experts that
nobody chose end at once; the down projection, where so many would cost more than they find, has
them for every routed token, and an expert's first one serves the others too.

Legend: T tokens, N experts of a token, P = T * N routed tokens (t * N + n is token t at its n-th
expert), X experts, H hidden size, I an expert's size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import probe
from milepost.kernels.launches import quick
from milepost.kernels.moe.activation import activate, is_gated
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_BLOCK_M = 16
"""Tokens of a tile."""
_UP = {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5}
_DOWN = {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
_DOWN_OF_HALVES = _DOWN | {"BLOCK_K": 64, "num_stages": 5}
"""BLOCK_N are a program's outputs (both of gate and of up), BLOCK_K the inputs of one step; they
are fewer for experts whose size is an odd multiple of 64."""


def suits(hidden: Tensor, size: int) -> bool:
    """Whether the tokens fit a tile, and sizes (`size` is an expert's) are whole tiles of a 16-bit
    type."""
    is_whole = size % _UP["BLOCK_N"] == 0 and hidden.shape[1] % _DOWN["BLOCK_N"] == 0
    return len(hidden) <= _BLOCK_M and hidden.element_size() == 2 and is_whole


def project_up(hidden: Tensor, experts: Tensor, up: Tensor, active: Tensor) -> None:
    """`active` [P, I]: the routed tokens' `hidden` [T, H] through `up` [X, 2 * I, H] and SwiGLU, or
    through `up` [X, I, H] and the square of a ReLU.

    No token may have an expert twice in `experts` [T, N].
    """
    size = active.shape[1]
    num_experts, has_gates = up.shape[0], is_gated(up, size)
    _up_kernel[(num_experts * (size // _UP["BLOCK_N"]),)](
        hidden,
        up,
        active,
        experts,
        hidden.stride(0),
        len(hidden),
        EXPERTS=num_experts,
        TOP_K=experts.shape[1],
        INPUTS=hidden.shape[1],
        SIZE=size,
        GATED=has_gates,
        BLOCK_M=_BLOCK_M,
        **_fitted(_UP, 1 + has_gates, hidden),
        **OVERLAPPED,
    )


def project_down(
    active: Tensor, weights: Tensor, experts: Tensor, down: Tensor, partials: Tensor
) -> None:
    """`partials` [T, N, H]: `weights` [T, N] times `active` [P, I] through `down` [X, H, I]."""
    num_outputs, size = down.shape[1:]
    _down_kernel[(experts.numel() * (num_outputs // _DOWN["BLOCK_N"]),)](
        active,
        weights,
        down,
        partials,
        experts,
        len(experts),
        TOP_K=experts.shape[1],
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=_BLOCK_M,
        **_fitted(_DOWN_OF_HALVES if size % _DOWN["BLOCK_K"] else _DOWN, 1, active),
        **OVERLAPPED,
    )


def _fitted(tiles: dict[str, int], weights: int, inputs: Tensor) -> dict[str, int]:
    """The same with as many stages as the chip has room for; a step holds the tile of so many
    weights."""
    step = (_BLOCK_M + weights * tiles["BLOCK_N"]) * tiles["BLOCK_K"] * inputs.element_size()
    num_stages = probe(inputs.device).choose_stages(tiles["num_stages"], step)
    return tiles | {"num_stages": num_stages}


@triton.jit
def _find(experts, expert, num_tokens, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """Each token as routed to this expert [BLOCK_M], -1 if none is."""
    o_m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    routed = o_m * TOP_K + n
    is_routed = (o_m < num_tokens) & (n < TOP_K)
    chosen = tl.load(experts + routed, mask=is_routed, other=-1)
    return tl.max(tl.where(chosen == expert, routed, -1), 1)


@quick
@triton.jit(do_not_specialize=("num_tokens",))
def _up_kernel(
    hidden,
    up,
    active,
    experts,
    stride,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = SIZE // BLOCK_N
    # The last first: that is the shared one, if there is one.
    expert, tile = EXPERTS - 1 - tl.program_id(0) // TILES, tl.program_id(0) % TILES
    routed = _find(experts, expert, num_tokens, TOP_K, BLOCK_M)
    if tl.max(routed) < 0:
        return
    o_m, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last token repeat the first.
    token = tl.where(o_m < num_tokens, o_m, 0).to(tl.int64)
    p_x = hidden + token[:, None] * stride + o_k[None, :]
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    # Up rows stand behind the gates'.
    p_gate = up + expert.to(tl.int64) * (ROWS * INPUTS) + o_n[:, None] * INPUTS + o_k[None, :]
    p_up = p_gate + (ROWS - SIZE) * INPUTS
    # The weights are the left operand: they fill the tensor cores' tall side.
    b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_up = b_gate
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = tl.trans(tl.load(p_x + i_k))
        if GATED:
            b_gate = tl.dot(tl.load(p_gate + i_k), b_x, b_gate)
        b_up = tl.dot(tl.load(p_up + i_k), b_x, b_up)
    b_o = activate(b_up, b_gate, GATED).to(active.dtype.element_ty)
    target = active + (routed * SIZE)[None, :] + o_n[:, None]
    tl.store(target, b_o, mask=(routed >= 0)[None, :])


@quick
@triton.jit(do_not_specialize=("num_tokens",))
def _down_kernel(
    active,
    weights,
    down,
    partials,
    experts,
    num_tokens,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = OUTPUTS // BLOCK_N
    place, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(experts + place)
    routed = _find(experts, expert, num_tokens, TOP_K, BLOCK_M)
    is_row = routed >= 0
    if tl.min(tl.where(is_row, routed, place)) < place:
        return
    weight = tl.load(weights + routed, mask=is_row, other=0.0).to(tl.float32)
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    # Rows of tokens that chose others repeat this one's; they are not stored.
    p_x = active + (tl.where(is_row, routed, place) * SIZE)[:, None] + o_k[None, :]
    first = down + expert.to(tl.int64) * (OUTPUTS * SIZE)
    p_w = first + o_n[:, None] * SIZE + o_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, SIZE, BLOCK_K):
        acc = tl.dot(tl.load(p_w + i_k), tl.trans(tl.load(p_x + i_k)), acc)
    b_o = (acc * weight[None, :]).to(partials.dtype.element_ty)
    target = partials + (routed * OUTPUTS)[None, :] + o_n[:, None]
    tl.store(target, b_o, mask=is_row[None, :])
