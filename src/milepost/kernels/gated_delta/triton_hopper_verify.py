"""`triton_verify` on Hopper in one launch, in Gluon.

As `triton_hopper`: programs go through sequences and key heads, and while one works on a value
head's state, TMA brings the next. A key head's queries and keys are worked out once, for all tokens
and all its value heads, and wait in shared memory. A value head's state then goes through all
tokens in registers; the inputs of the next token are asked for before a token is taken in. What
happens with a token is what `triton_hopper` does, in its order: states are the same bit for bit.

Legend: S sequences, F folded and N new tokens of each, C channels, J taps, G key heads, V value
heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.triton_hopper_records import (
    keep_inputs,
    load_strengths,
    load_taps,
    load_window,
    record_strengths,
)
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.gluon import thread_barrier
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.states_gluon import (
    BY_LINE,
    STATE,
    STATE_SIZE,
    begin_work,
    convolve,
    decay_of,
    delta_rule,
    describe_states,
    rms_scale,
    sigmoid,
    take,
    times_silu,
    unit_vectors,
)
from milepost.kernels.verify_layout import VerifyLayout

_UNSPECIALISED = ["begin", "length", "fold", "row", "slot_in", "slot_out"]


def verify(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """See `triton_verify.verify`."""
    value_heads = recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * STATE_SIZE) // (2 * STATE_SIZE)
    num_units = layout.num_sequences * key_heads
    units_at_once = num_sms(projected.device)
    _verify_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        records,
        records.stride(0),
        records.stride(1),
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        describe_states(recurrent_pool),
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        output,
        num_units,
        KEY_HEADS=key_heads,
        GROUP=value_heads // key_heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        MAX_BETA=weights.max_beta,
        PLACES=2 * records.shape[1] + 1,
        STAGES=2 if num_units <= units_at_once else 1,
        num_warps=4,
        **OVERLAPPED,
    )


@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _verify_kernel(
    projected,
    projected_stride,
    records,
    row_stride,
    record_stride,
    conv_weight,
    conv_pool,
    conv_stride,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    states,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    output,
    num_units,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    BLOCK_TAPS: gl.constexpr,
    MAX_BETA: gl.constexpr,
    PLACES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each the value heads of a key head of a sequence."""
    WINDOW: gl.constexpr = gl.BlockedLayout([1, BLOCK_TAPS], [32, 1], [4, 1], [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    queries = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    keys = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    work = begin_work(
        states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], KEY_HEADS, GROUP, STAGES
    )
    first, stride = work[4], work[5]

    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    norm = gl.load(norm_weight + o_v), norm_eps
    wait_for_inputs()
    let_next_start()  # the output projection, which begins with its weights
    number = 0
    for unit in range(first, num_units, stride):
        sequence, key_head = unit // KEY_HEADS, unit % KEY_HEADS
        target = gl.load(slot_out + sequence)
        num_folded, num_new = gl.load(fold + sequence), gl.load(length + sequence)
        first_token = gl.load(begin + sequence).to(gl.int64)
        token = projected + first_token * projected_stride
        recorded = records + gl.load(row + sequence).to(gl.int64) * row_stride
        read = conv_pool + gl.load(slot_in + sequence).to(gl.int64) * conv_stride
        kept = conv_pool + target.to(gl.int64) * conv_stride
        written = pool + target.to(gl.int64) * slot_stride
        is_real, num_places = target >= 0, num_folded + num_new
        last = num_folded + gl.minimum(num_new, 1) - 1
        # Behind the step's last token there may be nobody's memory: a step may have none at all.
        stream = token, projected_stride, recorded, record_stride, read, num_folded, num_places

        target_at = kept, last, num_new, is_real
        _keep_keys(
            stream, conv_weight, key_head, queries, keys, target_at, KEY_HEADS, SIZE, TAPS, WINDOW
        )
        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            value_head = 2 * KEY_HEADS + head
            value_taps = load_taps(conv_weight, value_head, SIZE, TAPS, WINDOW)
            rate, bias = gl.load(decay_rate + head), gl.load(decay_bias + head)
            gates = token + CHANNELS + VALUE_HEADS * SIZE + head
            kept_gates = recorded + CHANNELS + head
            gate_at = token + CHANNELS + head * SIZE + o_v
            output_at = output + (first_token * VALUE_HEADS + head) * SIZE + o_v
            # Everything is asked for before anything is used.
            window = load_window(stream, value_head, 0, SIZE, TAPS, WINDOW)
            b_in, a_in = load_strengths(stream, gates, kept_gates, 0, VALUE_HEADS)

            state = take(work, number, STATE, BY_LINE, [SIZE, SIZE], KEY_HEADS, GROUP)
            number += 1
            inputs = window, value_taps, b_in, a_in, rate, bias, gates, kept_gates, gate_at
            _walk(
                stream, state, inputs, queries, keys, value_head, norm, output_at,
                (written, head, o_k, o_v, last, is_real), VALUE_HEADS, SIZE, TAPS, MAX_BETA, WINDOW,
            )  # fmt: skip
            # All that is read of the records and of the convolution's state has been.
            thread_barrier()
            keep_inputs(stream, value_head, target_at, SIZE, TAPS, WINDOW)
            record_strengths(stream, gates, kept_gates, num_new, VALUE_HEADS)


@gluon.jit
def _keep_keys(
    stream,
    conv_weight,
    key_head,
    queries,
    keys,
    target,
    KEY_HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """A key head's queries and keys, for all tokens, in shared memory; then `keep_inputs`."""
    num_places = stream[6]
    query_taps = load_taps(conv_weight, key_head, SIZE, TAPS, WINDOW)
    key_taps = load_taps(conv_weight, KEY_HEADS + key_head, SIZE, TAPS, WINDOW)
    query_window = load_window(stream, key_head, 0, SIZE, TAPS, WINDOW)
    key_window = load_window(stream, KEY_HEADS + key_head, 0, SIZE, TAPS, WINDOW)
    for place in range(num_places):
        query, key = convolve((query_window, query_taps)), convolve((key_window, key_taps))
        following = gl.minimum(place + 1, num_places - 1)
        query_window = load_window(stream, key_head, following, SIZE, TAPS, WINDOW)
        key_window = load_window(stream, KEY_HEADS + key_head, following, SIZE, TAPS, WINDOW)
        query, key = unit_vectors(query, key, SIZE)
        queries.index(place).store(query)
        keys.index(place).store(key)
    thread_barrier()
    for part in gl.static_range(2):
        keep_inputs(stream, part * KEY_HEADS + key_head, target, SIZE, TAPS, WINDOW)


@gluon.jit
def _walk(
    stream,
    state,
    inputs,
    queries,
    keys,
    value_head,
    norm,
    p_output,
    target,
    VALUE_HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    MAX_BETA: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Take a value head's state through all tokens: it is stored behind the last committed one, and
    read for each new one. `inputs` are those of the first token."""
    projected_stride, num_folded, num_places = stream[1], stream[5], stream[6]
    window, value_taps, b_in, a_in, rate, bias, gates, kept_gates, p_gate = inputs
    written, head, o_k, o_v, last, is_real = target
    scale, norm_eps = norm
    for place in range(num_places):
        new, is_new = place - num_folded, place >= num_folded
        gate = gl.load(p_gate + new * projected_stride, mask=is_new, other=0.0)
        beta, decay = sigmoid(b_in) * MAX_BETA, decay_of(a_in, rate, bias)
        value = gl.convert_layout(convolve((window, value_taps)), gl.SliceLayout(0, STATE))
        query = queries.index(place).load(gl.SliceLayout(1, STATE))[:, None]
        key = keys.index(place).load(gl.SliceLayout(1, STATE))[:, None]
        following = gl.minimum(place + 1, num_places - 1)
        window = load_window(stream, value_head, following, SIZE, TAPS, WINDOW)
        b_in, a_in = load_strengths(stream, gates, kept_gates, following, VALUE_HEADS)

        state = delta_rule(state * decay, key, value, beta)
        if place == last:
            at = written + head * (SIZE * SIZE) + o_k[:, None] * SIZE + o_v[None, :]
            gl.store(at, state, mask=is_real)
        if is_new:
            x = gl.sum(state * query, 0)
            x *= rms_scale(x, norm_eps, SIZE) * scale
            x = times_silu(x, gate).to(p_output.dtype.element_ty)
            gl.store(p_output + new * (VALUE_HEADS * SIZE), x)
