"""What the attention kernels over pages share: an item, the running softmax, products.

Legend: ROWS query rows of an item, BLOCK KV positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.attention.tiles import ITEM_SIZE
from milepost.kernels.platform.numerics import encode, scale_of
from milepost.kernels.platform.tensors import BLOCK

_ITEM_SIZE = tl.constexpr(ITEM_SIZE)
_DEPTH = tl.constexpr(BLOCK)


@triton.jit
def load_item(items, i_item):
    """First token, number of tokens, row of the page tables, position of the first token, begin and
    end of the KV, and ordinal (see `tiles`)."""
    p_item = items + i_item * _ITEM_SIZE
    first = tl.load(p_item)
    num_tokens = tl.load(p_item + 1)
    table_row = tl.load(p_item + 2)
    position = tl.load(p_item + 3)
    begin = tl.load(p_item + 4)
    end = tl.load(p_item + 5)
    ordinal = tl.load(p_item + 6)
    return first, num_tokens, table_row, position, begin, end, ordinal


@triton.jit
def fit_float16(b_q):
    """Queries in float16, which holds what float8 holds; bfloat16 reaches further."""
    return tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)


@triton.jit
def online_softmax(m, l, b_s, scale, MASKED: tl.constexpr):
    """Take a block's scores [ROWS, BLOCK] into the running softmax: the greatest score `m` [ROWS],
    the sum of shares `l` [ROWS]. Returns both, the block's shares, and by how much to shrink what
    was summed up before."""
    m_new = tl.maximum(m, tl.max(b_s, 1) * scale)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet has no m to subtract.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale - base[:, None])
    shrink = tl.exp2(m - base)
    return m_new, l * shrink + tl.sum(b_p, 1), b_p, shrink


@triton.jit
def dot(left, right, start=None):
    """Float32 stays float32: the matrix units would round it to 10 bits."""
    return tl.dot(left, right, start, input_precision="ieee")


@triton.jit
def round_heads(x, NATIVE: tl.constexpr):
    """Results [ROWS, E] in float8, and their scales [ROWS, D], D to a head."""
    PARTS: tl.constexpr = x.shape[1] // _DEPTH
    wide = tl.reshape(x.to(tl.float32), (x.shape[0], PARTS, _DEPTH))
    scales = scale_of(wide, 2)
    return tl.reshape(encode(wide / scales[:, :, None], NATIVE), x.shape), scales
