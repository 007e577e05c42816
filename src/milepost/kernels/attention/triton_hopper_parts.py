"""What a group of warps of Hopper's attention does with a block of KV, and with its result.

`bars` are 4 * STAGES barriers: blocks of keys loaded and used up, blocks of values loaded and used
up. SCORES is the layout of a block's scores [64, BLOCK], RESULT that of results [64, HEAD_DIM].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)


@gluon.jit
def load_item(item):
    """First token, number of tokens, position of the first token, begin and end of the KV, and
    ordinal (see `tiles`)."""
    first = gl.load(item)
    num_tokens = gl.load(item + 1)
    position = gl.load(item + 3)
    begin = gl.load(item + 4)
    end = gl.load(item + 5)
    ordinal = gl.load(item + 6)
    return first, num_tokens, position, begin, end, ordinal


@gluon.jit
def score(
    queries,
    keys,
    bars,
    i_b,
    SCORES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products of queries with a block's keys, whose place is free afterwards."""
    stage = i_b % STAGES
    mbarrier.wait(bars.index(stage), i_b // STAGES & 1)
    b_s = gl.zeros([64, BLOCK], gl.float32, layout=SCORES)
    b_s = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), b_s, use_acc=False)
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return b_s


@gluon.jit
def online_softmax(m, l, acc, b_s, scale, MASKED: gl.constexpr):
    """Take a block's scores into the running softmax; the last returned are its shares."""
    m_new = gl.maximum(m, gl.max(b_s, 1) * scale)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet has no m to subtract.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = gl.exp2(b_s * scale - base[:, None])
    shrink = gl.exp2(m - base)
    l = l * shrink + gl.sum(b_p, 1)
    RESULT: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    return m_new, l, acc, b_p


@gluon.jit
def add_values(acc, b_p, values, bars, i_b, RESULT: gl.constexpr, STAGES: gl.constexpr):
    """Add a block's values by their shares; their place is free afterwards."""
    stage = i_b % STAGES
    b_p = gl.convert_layout(b_p.to(values.dtype), gl.DotOperandLayout(0, RESULT, 2))
    mbarrier.wait(bars.index(2 * STAGES + stage), i_b // STAGES & 1)
    acc = warpgroup_mma(b_p, values.index(stage), acc)
    mbarrier.arrive(bars.index(3 * STAGES + stage), count=1)
    return acc


@gluon.jit
def clean(source, target, num_valid, BLOCK: gl.constexpr, LOADED: gl.constexpr):
    """Copy a block's values but for those past the end, which become 0; in parts, which need few
    registers."""
    PART: gl.constexpr = BLOCK // 4
    for first in gl.static_range(0, BLOCK, PART):
        place = first + gl.arange(0, PART, layout=gl.SliceLayout(1, LOADED))
        part = source.slice(first, PART).load(LOADED)
        target.slice(first, PART).store(gl.where((place < num_valid)[:, None], part, 0.0))
    fence_async_shared()


@gluon.jit
def store(
    targets,
    m,
    l,
    acc,
    row,
    half: gl.constexpr,
    first,
    num_tokens,
    ordinal,
    i_h,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
):
    """To `output`, if GATED times the sigmoid of the gates; or a partial result with its LSE."""
    gate, gate_stride, output, bases, partials, lse = targets
    RESULT: gl.constexpr = acc.type.layout
    HEAD_DIM: gl.constexpr = acc.type.shape[1]
    wide_row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    o_e = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
    token = (first + wide_row // GROUP).to(gl.int64)
    inside = (i_h * GROUP + wide_row % GROUP)[:, None] * HEAD_DIM + o_e[None, :]
    held = (wide_row // GROUP < num_tokens)[:, None] & (o_e >= 0)[None, :]
    if ordinal < 0:
        if GATED:
            b_g = gl.load(gate + token[:, None] * gate_stride + inside, mask=held, other=0.0)
            acc = acc / (1.0 + gl.exp2(b_g.to(gl.float32) * -1.4426950408889634))
        p_o = output + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        gl.store(p_o, acc.to(output.dtype.element_ty), mask=held)
    else:
        base = gl.load(bases + token, mask=wide_row // GROUP < num_tokens, other=0).to(gl.int64)
        p_partial = partials + (base + ordinal)[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        gl.store(p_partial, acc, mask=held)
        has_token = row // GROUP < num_tokens
        lse_base = gl.load(bases + first + row // GROUP, mask=has_token, other=0).to(gl.int64)
        head = i_h * GROUP + row % GROUP
        p_lse = lse + (lse_base + ordinal) * (KV_HEADS * GROUP) + head
        gl.store(p_lse, m + gl.log2(l), mask=has_token)
