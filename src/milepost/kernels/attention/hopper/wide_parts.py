"""Steps of a group of warps in Hopper's attention: blocks of KV, and the result.

SCORES is the layout of a block's scores [64, BLOCK], RESULT that of results [64, head_dim].
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.attention.portable.blocks import load_gate
from milepost.kernels.platform.gluon import release, wait_loaded
from milepost.kernels.platform.numerics import online_softmax


class WideSizes(NamedTuple):
    """Sizes that the kernel is compiled for; a constant on the device."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    page_size: int
    block: int
    stages: int


class SharedBlocks(NamedTuple):
    """Shared memory of a program."""

    queries: Any
    """[2, 64, head_dim], or one group's [64, head_dim]."""
    key_blocks: Any
    """[stages, BLOCK, head_dim]"""
    value_blocks: Any
    key_bars: Any
    value_bars: Any
    """Barriers of two rings: see `platform.gluon`."""


class Softmax(NamedTuple):
    """A running softmax."""

    m: Any
    """[64] maximum score."""
    l: Any
    """[64] sum of weights."""
    acc: Any
    """[64, head_dim] sum of values."""
    b_p: Any
    """[64, BLOCK] weights of the last block, whose values are not added yet."""


@gluon.jit
def attend_blocks(
    blocks, scale, item, last_seen, SCORES: gl.constexpr, RESULT: gl.constexpr, SIZES: gl.constexpr
):
    """Passes over the blocks of a range. A block's scores and the values of the block before are
    multiplied while softmax weights are computed.

    Returns m, l, acc, the last block's weights, whose values are not added yet, and its number.
    """
    BLOCK: gl.constexpr = SIZES.block
    HEAD_DIM: gl.constexpr = SIZES.head_dim
    begin, end = item.begin, item.end
    # All rows see all of the blocks before this position.
    masked = begin + gl.maximum(gl.minimum(end, item.position + 1) - begin, 0) // BLOCK * BLOCK
    m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    l = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, HEAD_DIM], gl.float32, layout=RESULT)
    b_s = _start_scores(blocks, 0, SCORES, SIZES)
    b_s = _finish_scores(blocks, b_s, 0, 0, SIZES)
    b_s = _hide(b_s, begin, last_seen, SCORES, BLOCK)
    m, l, b_p, _shrink = online_softmax(m, l, b_s, scale, True)
    state = Softmax(m, l, acc, _as_operand(b_p, blocks, RESULT))
    i_b = 1
    for i_kv in range(begin + BLOCK, masked, BLOCK):
        state = _advance(blocks, state, scale, i_b, i_kv, last_seen, False, SCORES, RESULT, SIZES)
        i_b += 1
    for i_kv in range(gl.maximum(masked, begin + BLOCK), end, BLOCK):
        state = _advance(blocks, state, scale, i_b, i_kv, last_seen, True, SCORES, RESULT, SIZES)
        i_b += 1
    return state.m, state.l, state.acc, state.b_p, i_b - 1


@gluon.jit
def _advance(
    blocks,
    state,
    scale,
    i_b,
    i_kv,
    last_seen,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    SIZES: gl.constexpr,
):
    """Adds the values of the block before, and a block's scores to the running softmax."""
    b_s = _start_scores(blocks, i_b, SCORES, SIZES)
    acc = _start_values(blocks, state.acc, state.b_p, i_b - 1)
    b_s = _finish_scores(blocks, b_s, i_b, 1, SIZES)
    if MASKED:
        b_s = _hide(b_s, i_kv, last_seen, SCORES, SIZES.block)
    m, l, b_new, shrink = online_softmax(state.m, state.l, b_s, scale, MASKED)
    b_new = _as_operand(b_new, blocks, RESULT)
    acc, _b_p = warpgroup_mma_wait(0, [acc, state.b_p])
    release(blocks.value_bars, (i_b - 1) % SIZES.stages)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    return Softmax(m, l, acc, b_new)


@gluon.jit
def _start_scores(blocks, i_b, SCORES: gl.constexpr, SIZES: gl.constexpr):
    """Starts multiplying queries with a block's keys."""
    right = blocks.key_blocks.index(wait_loaded(blocks.key_bars, i_b)).permute((1, 0))
    BLOCK: gl.constexpr = SIZES.block
    b_s = gl.zeros([64, BLOCK], gl.float32, layout=SCORES)
    return warpgroup_mma(blocks.queries, right, b_s, use_acc=False, is_async=True)


@gluon.jit
def _finish_scores(blocks, b_s, i_b, LATER: gl.constexpr, SIZES: gl.constexpr):
    """Waits for the scores while LATER products that were started afterwards go on; frees the keys'
    place."""
    b_s = warpgroup_mma_wait(LATER, [b_s])
    release(blocks.key_bars, i_b % SIZES.stages)
    return b_s


@gluon.jit
def _start_values(blocks, acc, b_p, i_b):
    """Starts adding a block's values by their weights."""
    stage = wait_loaded(blocks.value_bars, i_b)
    return warpgroup_mma(b_p, blocks.value_blocks.index(stage), acc, is_async=True)


@gluon.jit
def add_values(blocks, acc, b_p, i_b):
    """Adds the last block's values by their weights."""
    acc = _start_values(blocks, acc, b_p, i_b)
    return warpgroup_mma_wait(0, [acc])


@gluon.jit
def _hide(b_s, i_kv, last_seen, SCORES: gl.constexpr, BLOCK: gl.constexpr):
    """Masks the scores of positions after a row's own."""
    o_kv = i_kv + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
    return gl.where(o_kv[None, :] <= last_seen[:, None], b_s, float("-inf"))


@gluon.jit
def _as_operand(b_p, blocks, RESULT: gl.constexpr):
    return gl.convert_layout(b_p.to(blocks.value_blocks.dtype), gl.DotOperandLayout(0, RESULT, 2))


@gluon.jit
def clean(source, target, num_valid, BLOCK: gl.constexpr, LOADED: gl.constexpr):
    """Copies a block's values with zeros past the end, in parts that need few registers."""
    PART: gl.constexpr = BLOCK // 4
    for first in gl.static_range(0, BLOCK, PART):
        place = first + gl.arange(0, PART, layout=gl.SliceLayout(1, LOADED))
        part = source.slice(first, PART).load(LOADED)
        target.slice(first, PART).store(gl.where((place < num_valid)[:, None], part, 0.0))
    fence_async_shared()


@gluon.jit
def store(call, item, i_h, row, m, l, acc, half: gl.constexpr, SIZES: gl.constexpr):
    """Writes results, times the sigmoid of the gates if there are any; or partial results with
    their LSE. `row` [64] is in the scores' layout."""
    GROUP: gl.constexpr = SIZES.group
    HEADS: gl.constexpr = SIZES.kv_heads * GROUP
    HEAD_DIM: gl.constexpr = SIZES.head_dim
    RESULT: gl.constexpr = acc.type.layout
    gate, output, partials = call.gate, call.output, call.partials
    wide_row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    o_e = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
    token = (item.first + wide_row // GROUP).to(gl.int64)
    inside = (i_h * GROUP + wide_row % GROUP)[:, None] * HEAD_DIM + o_e[None, :]
    is_held = wide_row // GROUP < item.num_tokens
    held = is_held[:, None] & (o_e >= 0)[None, :]
    if item.ordinal < 0:
        if gate.base is not None:
            b_g = load_gate(gate, token[:, None], inside, held)
            acc = acc / (1.0 + gl.exp2(b_g.to(gl.float32) * -1.4426950408889634))
        b_o = acc.to(output.dtype.element_ty)
        gl.store(output + token[:, None] * (HEADS * HEAD_DIM) + inside, b_o, mask=held)
    else:
        base = gl.load(call.work.bases + token, mask=is_held, other=0).to(gl.int64)
        p_partial = partials.base + (base + item.ordinal)[:, None] * (HEADS * HEAD_DIM) + inside
        gl.store(p_partial, acc, mask=held)
        has_token = row // GROUP < item.num_tokens
        p_base = call.work.bases + item.first + row // GROUP
        lse_base = gl.load(p_base, mask=has_token, other=0).to(gl.int64)
        head = i_h * GROUP + row % GROUP
        p_lse = partials.lse + (lse_base + item.ordinal) * HEADS + head
        gl.store(p_lse, m + gl.log2(l), mask=has_token)
