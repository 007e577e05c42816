"""Triton: the experts' products for so few tokens that one tile has a row for each of them.

An expert that was chosen is multiplied with all tokens, which takes no longer than reading its
weights, and what was not asked for is dropped. So choices are not grouped first: each program looks
for its expert among them. The first product has programs for every expert, and those of experts
that nobody chose end at once; the second, of which so many would cost more than they find, has them
for every choice, and the first choice of an expert serves the others too.

Legend: T tokens, N choices of a token, P = T * N (choice t * N + n is the n-th of token t), X
experts, H hidden size, I an expert's size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import probe
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_ROWS = 16
"""Tokens of a tile."""
_EXPAND = {"COLUMNS": 64, "DEPTH": 64, "num_warps": 4, "num_stages": 5}
_CONTRACT = {"COLUMNS": 128, "DEPTH": 128, "num_warps": 4, "num_stages": 3}
"""COLUMNS are a program's outputs (of the first product both gate and up), DEPTH the inputs of one
step."""
_WHOLE = 128
"""Sizes that are multiples of this are whole tiles."""


def suits(hidden: Tensor, gate_up: Tensor) -> bool:
    """Whether the tokens fit a tile, and sizes are whole tiles of a 16-bit type."""
    size, num_inputs = gate_up.shape[1] // 2, gate_up.shape[2]
    is_whole = size % _WHOLE == 0 and num_inputs % _WHOLE == 0
    return len(hidden) <= _ROWS and hidden.element_size() == 2 and is_whole


def expand(hidden: Tensor, experts: Tensor, gate_up: Tensor, active: Tensor) -> None:
    """`active` [P, I]: SiLU(gate) * up of each choice's token in `hidden` [T, H].

    No token may have an expert twice in `experts` [T, N].
    """
    size = active.shape[1]
    num_experts = gate_up.shape[0]
    _expand_kernel[(num_experts * (size // _EXPAND["COLUMNS"]),)](
        hidden,
        gate_up,
        active,
        experts,
        hidden.stride(0),
        len(hidden),
        EXPERTS=num_experts,
        CHOSEN=experts.shape[1],
        INPUTS=hidden.shape[1],
        SIZE=size,
        ROWS=_ROWS,
        **_fitted(_EXPAND, 2, hidden),
        **OVERLAPPED,
    )


def contract(active: Tensor, weights: Tensor, experts: Tensor, down: Tensor, parts: Tensor) -> None:
    """`parts` [T, N, H]: `weights` [T, N] times the product of `active` [P, I] with `down`
    [X, H, I]."""
    num_outputs, size = down.shape[1:]
    _contract_kernel[(experts.numel() * (num_outputs // _CONTRACT["COLUMNS"]),)](
        active,
        weights,
        down,
        parts,
        experts,
        len(experts),
        CHOSEN=experts.shape[1],
        SIZE=size,
        OUTPUTS=num_outputs,
        ROWS=_ROWS,
        **_fitted(_CONTRACT, 1, active),
        **OVERLAPPED,
    )


def _fitted(tiles: dict[str, int], weights: int, inputs: Tensor) -> dict[str, int]:
    """The same with as many stages as the chip has room for; a step holds the tile of so many
    weights."""
    step = (_ROWS + weights * tiles["COLUMNS"]) * tiles["DEPTH"] * inputs.element_size()
    stages = probe(inputs.device).choose_stages(tiles["num_stages"], step)
    return tiles | {"num_stages": stages}


@triton.jit
def _find(experts, expert, num_tokens, CHOSEN: tl.constexpr, ROWS: tl.constexpr):
    """Each token's choice that is this expert [ROWS], -1 if none is."""
    row = tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, triton.next_power_of_2(CHOSEN))[None, :]
    choice = row * CHOSEN + n
    is_choice = (row < num_tokens) & (n < CHOSEN)
    chosen = tl.load(experts + choice, mask=is_choice, other=-1)
    return tl.max(tl.where(chosen == expert, choice, -1), 1)


@triton.jit(do_not_specialize=("num_tokens",))
def _expand_kernel(
    hidden,
    gate_up,
    active,
    experts,
    stride,
    num_tokens,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = SIZE // COLUMNS
    # The last first: that is the shared one, if there is one.
    expert, tile = EXPERTS - 1 - tl.program_id(0) // TILES, tl.program_id(0) % TILES
    choice = _find(experts, expert, num_tokens, CHOSEN, ROWS)
    if tl.max(choice) < 0:
        return
    row, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    # Rows beyond the last token repeat the first.
    token = tl.where(row < num_tokens, row, 0).to(tl.int64)
    x = hidden + token[:, None] * stride + k[None, :]
    first = gate_up + expert.to(tl.int64) * (2 * SIZE * INPUTS)
    w = first + column[:, None] * INPUTS + k[None, :]
    # The weights are the left operand: they fill the tensor cores' tall side.
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = gate
    for start in range(0, INPUTS, DEPTH):
        inputs = tl.trans(tl.load(x + start))
        gate = tl.dot(tl.load(w + start), inputs, gate)
        up = tl.dot(tl.load(w + SIZE * INPUTS + start), inputs, up)
    result = (gate * tl.sigmoid(gate) * up).to(active.dtype.element_ty)
    target = active + (choice * SIZE)[None, :] + column[:, None]
    tl.store(target, result, mask=(choice >= 0)[None, :])


@triton.jit(do_not_specialize=("num_tokens",))
def _contract_kernel(
    active,
    weights,
    down,
    parts,
    experts,
    num_tokens,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = OUTPUTS // COLUMNS
    place, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(experts + place)
    choice = _find(experts, expert, num_tokens, CHOSEN, ROWS)
    is_row = choice >= 0
    if tl.min(tl.where(is_row, choice, place)) < place:
        return
    weight = tl.load(weights + choice, mask=is_row, other=0.0).to(tl.float32)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Rows of tokens that chose others repeat this choice's; they are not stored.
    x = active + (tl.where(is_row, choice, place) * SIZE)[:, None] + k[None, :]
    first = down + expert.to(tl.int64) * (OUTPUTS * SIZE)
    w = first + column[:, None] * SIZE + k[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        total = tl.dot(tl.load(w + start), tl.trans(tl.load(x + start)), total)
    result = (total * weight[None, :]).to(parts.dtype.element_ty)
    target = parts + (choice * OUTPUTS)[None, :] + column[:, None]
    tl.store(target, result, mask=is_row[None, :])
