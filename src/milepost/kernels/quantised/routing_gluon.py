"""Which experts one token chooses and with which shares, in Gluon: `moe.routing`'s softmax, made
again by every program that needs it, which costs less than to wait for a launch.

Legend: X experts, N experts of a token.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.moe.routing import LOWEST, as_keys, expert_of, logits_of

MOST_EXPERTS = 256
"""Of so many finding out takes less than a launch; more were not measured."""
_LOGITS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_SHARES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""All warps hold the same."""


@gluon.jit
def load_logits(logits, EXPERTS: gl.constexpr, COLUMNS: gl.constexpr):
    """The token's, [COLUMNS]."""
    o_e = gl.arange(0, COLUMNS, gl.SliceLayout(0, _LOGITS))
    # The caches nearby may not know them yet where the kernel that wrote them is not the one ahead.
    return gl.load(logits + o_e, mask=o_e < EXPERTS, other=0.0, cache_modifier=".cg")


@gluon.jit
def best_keys(b_logits, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr):
    """Of the largest logits, the largest first (see `moe.routing`)."""
    dtype: gl.constexpr = b_logits.dtype
    o_e = gl.arange(0, b_logits.shape[0], gl.SliceLayout(0, _LOGITS))
    left = gl.where(o_e < EXPERTS, as_keys(b_logits.to(gl.float32), o_e, dtype), LOWEST)
    keys = ()
    for _ in gl.static_range(CHOSEN):
        key = gl.max(left, 0)
        left = gl.where(left == key, LOWEST, left)
        keys += (key,)
    return keys


@gluon.jit
def experts_of(keys, EXPERTS: gl.constexpr, SHARED: gl.constexpr):
    """Numbers of the chosen experts, behind them the shared ones'."""
    experts = ()
    for n in gl.static_range(len(keys)):
        experts += (expert_of(keys[n]),)
    for n in gl.static_range(SHARED):
        experts += (EXPERTS + n,)
    return experts


@gluon.jit
def shares_of(keys, logits, EXPERTS: gl.constexpr, SHARED: gl.constexpr):
    """Shares of as many, as they are rounded to the logits' type; the chosen ones' add up to 1."""
    dtype: gl.constexpr = logits.dtype.element_ty
    CHOSEN: gl.constexpr = len(keys)
    WIDTH: gl.constexpr = _power_of_2(CHOSEN + SHARED)
    largest = logits_of(keys[0], dtype)
    o_n = gl.arange(0, WIDTH, gl.SliceLayout(0, _SHARES))
    b_shares = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, _SHARES))
    for n in gl.static_range(CHOSEN):
        b_shares = gl.where(o_n == n, gl.exp(logits_of(keys[n], dtype) - largest), b_shares)
    total = gl.sum(b_shares, 0)
    shares = ()
    for n in gl.static_range(CHOSEN):
        share = gl.exp(logits_of(keys[n], dtype) - largest) / total
        shares += (share.to(dtype).to(gl.float32),)
    if SHARED:
        gate = gl.load(logits + EXPERTS, cache_modifier=".cg").to(gl.float32)
        share = tl.sigmoid(gate).to(dtype).to(gl.float32)
        for _ in gl.static_range(SHARED):
            shares += (share,)
    return shares


@gluon.constexpr_function
def _power_of_2(number):
    return 1 << (number - 1).bit_length()


@gluon.jit
def pick(values, index):
    """`values[index]`, of scalars and any tensor of indices."""
    found = values[0] + 0 * index
    for n in gl.static_range(1, len(values)):
        found = gl.where(index == n, values[n], found)
    return found
