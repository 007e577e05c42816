"""Verify steps on Hopper in one launch, in Gluon.

As `triton_hopper`: programs go through sequences and key heads, and while one works on a value
head's state, TMA brings the next. A key head's queries and keys are worked out once, for all tokens
and all its value heads, and a value head's values; they wait in shared memory. Its state then goes
through all tokens in registers. What happens with a token is what `triton_hopper` does, in its
order: states and outputs are the same bit for bit.

Legend: S sequences, F folded and N new tokens of each, C channels, J taps, G key heads, V value
heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.verify import VerifyLayout
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    BY_LINE,
    CHANNEL,
    STATE,
    STATE_SIZE,
    begin_work,
    convolve,
    decay_of,
    delta_rule,
    describe_states,
    load_taps,
    read_rows,
    rms_scale,
    sigmoid,
    take,
    times_silu,
    unit_vectors,
)
from milepost.kernels.recurrent.hopper.stream import (
    ROWS,
    keep_rows,
    leave_column,
    leave_inputs,
    load_inputs,
    load_rows,
    open_stream,
    row_of,
)

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
    """See `triton_step.verify`."""
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
        MAX_BETA=weights.max_beta,
        PLACES=2 * records.shape[1] + 1,
        STAGES=2 if num_units <= units_at_once else 1,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
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
    MAX_BETA: gl.constexpr,
    PLACES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each the value heads of a key head of a sequence."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    GATES: gl.constexpr = VALUE_HEADS * SIZE
    STEP: gl.constexpr = min(PLACES, 8)  # tokens whose inputs a thread holds at a time
    rows = gl.allocate_shared_memory(gl.float32, [2 * PLACES, SIZE // 4, 4], ROWS)
    columns = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    work = begin_work(
        states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], KEY_HEADS, GROUP, STAGES
    )
    first, stride = work[4], work[5]
    o_c = gl.arange(0, SIZE, layout=CHANNEL)
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    norm = gl.load(norm_weight + o_v), norm_eps
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    step = projected, projected_stride, records, row_stride, record_stride
    sequences = begin, length, fold, row, slot_out
    number = 0
    for unit in range(first, num_units, stride):
        sequence, key_head = unit // KEY_HEADS, unit % KEY_HEADS
        stream, first_token, target = open_stream(step, sequences, sequence)
        token, _, recorded, _, num_folded, num_places = stream
        gate, kept_gate = token + CHANNELS + GATES, recorded + CHANNELS
        gates = gate, projected_stride, kept_gate, record_stride, num_folded, num_places
        read = conv_pool + gl.load(slot_in + sequence).to(gl.int64) * conv_stride
        kept = conv_pool + target.to(gl.int64) * conv_stride
        o_key, o_value = key_head * SIZE + o_c, (2 * KEY_HEADS + key_head * GROUP) * SIZE + o_c
        small = read, kept, conv_weight
        tokens = stream, small, o_key
        WIDTH: gl.constexpr = KEY_HEADS * SIZE
        _keep_keys(*tokens, (rows, 0), True, WIDTH, SIZE, TAPS, PLACES, STEP)
        if PLACES > STEP:
            for begin_at in range(STEP, num_places, STEP):
                _keep_keys(*tokens, (rows, begin_at), False, WIDTH, SIZE, TAPS, PLACES, STEP)
        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            rate, bias = gl.load(decay_rate + head), gl.load(decay_bias + head)
            tokens = stream, small, o_value + member * SIZE
            _keep_values(*tokens, (columns, 0), True, TAPS, STEP)
            if PLACES > STEP:
                for begin_at in range(STEP, num_places, STEP):
                    _keep_values(*tokens, (columns, begin_at), False, TAPS, STEP)
            state = take(work, number, STATE, BY_LINE, [SIZE, SIZE], KEY_HEADS, GROUP)
            number += 1
            written = pool + target.to(gl.int64) * slot_stride + head * (SIZE * SIZE)
            p_gate = token + CHANNELS + head * SIZE + o_v
            p_output = output + (first_token * VALUE_HEADS + head) * SIZE + o_v
            own = head, VALUE_HEADS, rate, bias, MAX_BETA
            at = rows, columns, written, p_gate, projected_stride, p_output, GATES
            _walk(gates, state, own, norm, at, SIZE, PLACES)
            # All threads have read what these columns had recorded.
            thread_barrier()
            leave_column(gates, head, o_c)
            leave_column(gates, VALUE_HEADS + head, o_c)


@gluon.jit
def _keep_keys(
    stream,
    small,
    channel,
    at,
    IS_FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    PLACES: gl.constexpr,
    STEP: gl.constexpr,
):
    """A key head's queries and keys of STEP tokens in shared memory; leaves their inputs."""
    read, kept, weight = small
    rows, begin = at
    queries = load_inputs(stream, read, channel, begin, IS_FIRST, TAPS, STEP)
    keys = load_inputs(stream, read, WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
    query_taps = load_taps(weight, channel, TAPS)
    key_taps = load_taps(weight, WIDTH + channel, TAPS)
    for ahead in gl.static_range(STEP):
        place = begin + ahead
        if place < stream[5]:
            query = convolve(queries, query_taps, TAPS, ahead)
            key = convolve(keys, key_taps, TAPS, ahead)
            query, key = unit_vectors(query, key, SIZE)
            keep_rows(rows.index(place), query)
            keep_rows(rows.index(PLACES + place), key)
    leave_inputs(queries, stream, kept, channel, begin, TAPS, STEP)
    leave_inputs(keys, stream, kept, WIDTH + channel, begin, TAPS, STEP)


@gluon.jit
def _keep_values(
    stream,
    small,
    channel,
    at,
    IS_FIRST: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """Likewise a value head's values."""
    read, kept, weight = small
    columns, begin = at
    values = load_inputs(stream, read, channel, begin, IS_FIRST, TAPS, STEP)
    taps = load_taps(weight, channel, TAPS)
    for ahead in gl.static_range(STEP):
        if begin + ahead < stream[5]:
            columns.index(begin + ahead).store(convolve(values, taps, TAPS, ahead))
    leave_inputs(values, stream, kept, channel, begin, TAPS, STEP)


@gluon.jit
def _walk(
    gates,
    state,
    own,
    norm,
    at,
    SIZE: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Take a value head's state through all tokens: it is stored behind the last committed one, and
    read for each new one. `gates` is the stream of what betas and decays are made of."""
    head, value_heads, rate, bias, max_beta = own
    scale, norm_eps = norm
    rows, columns, written, p_gate, gate_stride, p_output, output_stride = at
    num_folded, num_places = gates[4], gates[5]
    last = gl.minimum(num_folded, num_places - 1)
    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    row = row_of(gates, 0) + head
    b_in = gl.load(row, mask=num_places > 0, other=0.0)
    a_in = gl.load(row + value_heads, mask=num_places > 0, other=0.0)
    for place in range(num_places):
        new, is_new = place - num_folded, place >= num_folded
        gate = gl.load(p_gate + new * gate_stride, mask=is_new, other=0.0)
        beta, decay = sigmoid(b_in) * max_beta, decay_of(a_in, rate, bias)
        row = row_of(gates, gl.minimum(place + 1, num_places - 1)) + head
        b_in, a_in = gl.load(row), gl.load(row + value_heads)
        key = load_rows(rows.index(PLACES + place))
        value = columns.index(place).load(gl.SliceLayout(0, STATE))
        state = delta_rule(state * decay, key, value, beta)
        if place == last:
            gl.store(written + o_k[:, None] * SIZE + o_v[None, :], state)
        if is_new:
            x = read_rows(state, load_rows(rows.index(place)))
            x *= rms_scale(x, norm_eps, SIZE) * scale
            x = times_silu(x, gate).to(p_output.dtype.element_ty)
            gl.store(p_output + new * output_stride, x)
