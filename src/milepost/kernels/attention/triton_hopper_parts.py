"""What a group of warps of Hopper's attention does with a block of KV, and with its result.

`places` are (queries [64, HEAD_DIM], keys and values [STAGES, BLOCK, HEAD_DIM], bars) in shared
memory; `bars` are 4 * STAGES barriers: blocks of keys loaded and used up, blocks of values loaded
and used up. SCORES is the layout of a block's scores [64, BLOCK], RESULT that of results
[64, HEAD_DIM].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.gluon import round_block


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
def attend_blocks(
    places,
    scale,
    begin,
    masked,
    end,
    last_seen,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Pass over the blocks of a range; all rows see all of those before `masked`. A block's scores
    and the values of the one before are multiplied while the shares of neither are worked out.
    `scale` [64] is that of each row's scores.

    Returns m, l, acc, the last block's shares, whose values are not added yet, and its number.
    """
    m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    l = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
    HEAD_DIM: gl.constexpr = places[2].type.shape[2]
    acc = gl.zeros([64, HEAD_DIM], gl.float32, layout=RESULT)
    b_s = _start_scores(places, 0, SCORES, BLOCK, STAGES)
    b_s = _finish_scores(places, b_s, 0, 0, STAGES)
    b_s = _hide(b_s, begin, last_seen, SCORES, BLOCK)
    m, l, b_p, _shrink = _online_softmax(m, l, b_s, scale, True)
    b_p = _as_operand(b_p, places, RESULT)
    i_b = 1
    for i_kv in range(begin + BLOCK, masked, BLOCK):
        place = i_b, i_kv, last_seen
        m, l, acc, b_p = _advance(
            places, m, l, acc, b_p, scale, place, False, SCORES, RESULT, BLOCK, STAGES
        )
        i_b += 1
    for i_kv in range(gl.maximum(masked, begin + BLOCK), end, BLOCK):
        place = i_b, i_kv, last_seen
        m, l, acc, b_p = _advance(
            places, m, l, acc, b_p, scale, place, True, SCORES, RESULT, BLOCK, STAGES
        )
        i_b += 1
    return m, l, acc, b_p, i_b - 1


@gluon.jit
def _advance(
    places,
    m,
    l,
    acc,
    b_p,
    scale,
    place,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add the values of the block before, and take a block's scores into the running softmax."""
    i_b, i_kv, last_seen = place
    bars = places[3]
    b_s = _start_scores(places, i_b, SCORES, BLOCK, STAGES)
    acc = _start_values(places, acc, b_p, i_b - 1, STAGES)
    b_s = _finish_scores(places, b_s, i_b, 1, STAGES)
    if MASKED:
        b_s = _hide(b_s, i_kv, last_seen, SCORES, BLOCK)
    m, l, b_new, shrink = _online_softmax(m, l, b_s, scale, MASKED)
    b_new = _as_operand(b_new, places, RESULT)
    acc, b_p = warpgroup_mma_wait(0, [acc, b_p])
    mbarrier.arrive(bars.index(3 * STAGES + (i_b - 1) % STAGES), count=1)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    return m, l, acc, b_new


@gluon.jit
def _start_scores(places, i_b, SCORES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Have queries multiplied with a block's keys."""
    queries, keys, _, bars = places
    mbarrier.wait(bars.index(i_b % STAGES), i_b // STAGES & 1)
    right = keys.index(i_b % STAGES).permute((1, 0))
    b_s = gl.zeros([64, BLOCK], gl.float32, layout=SCORES)
    return warpgroup_mma(queries, right, b_s, use_acc=False, is_async=True)


@gluon.jit
def _finish_scores(places, b_s, i_b, LATER: gl.constexpr, STAGES: gl.constexpr):
    """The products, after which LATER others were begun; the keys' place is free afterwards."""
    b_s = warpgroup_mma_wait(LATER, [b_s])
    mbarrier.arrive(places[3].index(STAGES + i_b % STAGES), count=1)
    return b_s


@gluon.jit
def _start_values(places, acc, b_p, i_b, STAGES: gl.constexpr):
    """Have a block's values added by their shares."""
    values, bars = places[2], places[3]
    mbarrier.wait(bars.index(2 * STAGES + i_b % STAGES), i_b // STAGES & 1)
    return warpgroup_mma(b_p, values.index(i_b % STAGES), acc, is_async=True)


@gluon.jit
def add_values(places, acc, b_p, i_b, STAGES: gl.constexpr):
    """Add the last block's values by their shares."""
    acc = _start_values(places, acc, b_p, i_b, STAGES)
    return warpgroup_mma_wait(0, [acc])


@gluon.jit
def _hide(b_s, i_kv, last_seen, SCORES: gl.constexpr, BLOCK: gl.constexpr):
    """Scores of what lies behind a row."""
    o_kv = i_kv + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
    return gl.where(o_kv[None, :] <= last_seen[:, None], b_s, float("-inf"))


@gluon.jit
def _as_operand(b_p, places, RESULT: gl.constexpr):
    return gl.convert_layout(b_p.to(places[2].dtype), gl.DotOperandLayout(0, RESULT, 2))


@gluon.jit
def _online_softmax(m, l, b_s, scale, MASKED: gl.constexpr):
    """Take a block's scores into the running softmax. Returns its shares, and by how much to shrink
    what was summed up before."""
    m_new = gl.maximum(m, gl.max(b_s, 1) * scale)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet has no m to subtract.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = gl.exp2(b_s * scale[:, None] - base[:, None])
    shrink = gl.exp2(m - base)
    return m_new, l * shrink + gl.sum(b_p, 1), b_p, shrink


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
    half: gl.constexpr,
    place,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    FORM: gl.constexpr,
):
    """To `output`, if GATED times the sigmoid of the gates, or to float8, or to both; or a partial
    result with its LSE. FORM are for how many dimensions there is a scale, 0 for no float8, and
    whether `output` is written."""
    DEPTH: gl.constexpr = FORM[0]
    KEEPS_ROWS: gl.constexpr = FORM[1]
    gate, gate_stride, output, bases, partials, lse, rounded = targets
    row, first, num_tokens, ordinal, i_h = place
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
        b_o = acc.to(output.dtype.element_ty)
        if KEEPS_ROWS:
            p_o = output + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
            gl.store(p_o, b_o, mask=held)
        if DEPTH:
            _store_rounded(rounded, b_o, half, place, KV_HEADS, GROUP, DEPTH)
    else:
        base = gl.load(bases + token, mask=wide_row // GROUP < num_tokens, other=0).to(gl.int64)
        p_partial = partials + (base + ordinal)[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        gl.store(p_partial, acc, mask=held)
        has_token = row // GROUP < num_tokens
        lse_base = gl.load(bases + first + row // GROUP, mask=has_token, other=0).to(gl.int64)
        head = i_h * GROUP + row % GROUP
        p_lse = lse + (lse_base + ordinal) * (KV_HEADS * GROUP) + head
        gl.store(p_lse, m + gl.log2(l), mask=has_token)


@gluon.jit
def _store_rounded(
    rounded,
    b_o,
    half: gl.constexpr,
    place,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Results [64, HEAD_DIM] in float8, with a scale for each DEPTH of them."""
    values, scales, scales_stride = rounded
    _, first, num_tokens, _, i_h = place
    HEAD_DIM: gl.constexpr = b_o.shape[1]
    PARTS: gl.constexpr = HEAD_DIM // DEPTH
    parted, b_scale = round_block(b_o.to(gl.float32).reshape([64, PARTS, DEPTH]), 2)
    b_o = parted.reshape([64, HEAD_DIM])
    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, b_o.type.layout))
    o_e = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, b_o.type.layout))
    token = (first + row // GROUP).to(gl.int64)[:, None]
    held = (row // GROUP < num_tokens)[:, None] & (o_e >= 0)[None, :]
    inside = (i_h * GROUP + row % GROUP)[:, None] * HEAD_DIM + o_e[None, :]
    gl.store(values + token * (KV_HEADS * GROUP * HEAD_DIM) + inside, b_o, mask=held)
    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, b_scale.type.layout))
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, b_scale.type.layout))
    held = (row // GROUP < num_tokens)[:, None] & (part >= 0)[None, :]
    at = (i_h * GROUP + row % GROUP)[:, None] * PARTS + part[None, :]
    gl.store(scales + at * scales_stride + (first + row // GROUP)[:, None], b_scale, mask=held)
