"""Verify steps on Hopper in one launch, in Gluon.

As `triton_hopper`: a head's whole state in each program, which TMA brings to shared memory while
the program works on the one before. What does not depend on the state is worked out first, for all
tokens, and waits in shared memory. What happens with a token is what `triton_hopper` does, in its
order: states and outputs are the same bit for bit.

Legend: S sequences, F folded and N new tokens of each, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.kda.weights import KDAWeights
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
    delta_rule,
    describe_states,
    load_taps,
    read_rows,
    rms_scale,
    sigmoid,
    softplus,
    take,
    unit_vectors,
)
from milepost.kernels.recurrent.hopper.stream import (
    ROWS,
    keep_rows,
    leave_column,
    leave_inputs,
    leave_places,
    load_inputs,
    load_places,
    load_rows,
    open_stream,
    row_of,
)

_UNSPECIALISED = ["begin", "length", "fold", "row", "slot_in", "slot_out"]


def verify(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """See `triton_step.verify`."""
    heads, conv_width = recurrent_pool.shape[1], weights.conv.shape[1]
    num_units = layout.num_sequences * heads
    units_at_once = num_sms(projected.device)
    _verify_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
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
        HEADS=heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        PLACES=2 * records.shape[1] + 1,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _verify_kernel(
    projected,
    projected_stride,
    decay_inputs,
    gate,
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
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Every so many units, each a head of a sequence."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDTH: gl.constexpr = HEADS * SIZE
    STEP: gl.constexpr = min(PLACES, 8)  # tokens whose inputs a thread holds at a time
    rows = gl.allocate_shared_memory(gl.float32, [3 * PLACES, SIZE // 4, 4], ROWS)
    columns = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    vectors = rows, columns
    work = begin_work(states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], HEADS, 1, 1)
    first, stride = work[4], work[5]
    o_c = gl.arange(0, SIZE, layout=CHANNEL)
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    norm = gl.load(norm_weight + o_v), norm_eps
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    step = projected, projected_stride, records, row_stride, record_stride
    sequences = begin, length, fold, row, slot_out
    for unit in range(first, num_units, stride):
        sequence, head = unit // HEADS, unit % HEADS
        stream, first_token, target = open_stream(step, sequences, sequence)
        _, _, recorded, _, num_folded, num_places = stream
        own, kept_own = decay_inputs + first_token * WIDTH, recorded + 3 * WIDTH + HEADS
        decays = own, WIDTH, kept_own, record_stride, num_folded, num_places
        read = conv_pool + gl.load(slot_in + sequence).to(gl.int64) * conv_stride
        kept = conv_pool + target.to(gl.int64) * conv_stride
        small = read, kept, conv_weight, gl.load(decay_rate + head), decay_bias
        channel = head * SIZE + o_c
        tokens = stream, decays, small, channel
        _keep_vectors(*tokens, (rows, columns, 0), True, WIDTH, SIZE, TAPS, PLACES, STEP)
        if PLACES > STEP:
            for begin_at in range(STEP, num_places, STEP):
                at = rows, columns, begin_at
                _keep_vectors(*tokens, at, False, WIDTH, SIZE, TAPS, PLACES, STEP)
        state = take(work, (unit - first) // stride, STATE, BY_LINE, [SIZE, SIZE], HEADS, 1)
        written = pool + target.to(gl.int64) * slot_stride + head * (SIZE * SIZE)
        o_own = first_token * WIDTH + head * SIZE + o_v
        own = gate + o_own, output + o_own, WIDTH
        _walk(stream, state, vectors, 3 * WIDTH + head, written, norm, own, SIZE, PLACES)
        # All threads have read what this column had recorded.
        thread_barrier()
        leave_column(stream, 3 * WIDTH + head, o_c)


@gluon.jit
def _keep_vectors(
    stream,
    decays,
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
    """A head's queries, keys, values and decays of STEP tokens in shared memory; leaves what they
    are made of."""
    read, kept, weight, rate, p_bias = small
    rows, columns, begin = at
    # Everything is asked for before anything is used.
    queries = load_inputs(stream, read, channel, begin, IS_FIRST, TAPS, STEP)
    keys = load_inputs(stream, read, WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
    values = load_inputs(stream, read, 2 * WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
    wide = load_places(decays, channel, begin, STEP)
    query_taps = load_taps(weight, channel, TAPS)
    key_taps = load_taps(weight, WIDTH + channel, TAPS)
    value_taps = load_taps(weight, 2 * WIDTH + channel, TAPS)
    bias = gl.load(p_bias + channel)
    for ahead in gl.static_range(STEP):
        place = begin + ahead
        if place < stream[5]:
            query = convolve(queries, query_taps, TAPS, ahead)
            key = convolve(keys, key_taps, TAPS, ahead)
            query, key = unit_vectors(query, key, SIZE)
            value = convolve(values, value_taps, TAPS, ahead)
            decay = gl.exp(rate * softplus(wide[ahead].to(gl.float32) + bias))
            keep_rows(rows.index(place), query)
            keep_rows(rows.index(PLACES + place), key)
            keep_rows(rows.index(2 * PLACES + place), decay)
            columns.index(place).store(value)
    leave_inputs(queries, stream, kept, channel, begin, TAPS, STEP)
    leave_inputs(keys, stream, kept, WIDTH + channel, begin, TAPS, STEP)
    leave_inputs(values, stream, kept, 2 * WIDTH + channel, begin, TAPS, STEP)
    leave_places(wide, decays, channel, begin, STEP)


@gluon.jit
def _walk(
    stream,
    state,
    vectors,
    strength,
    written,
    norm,
    own,
    SIZE: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Take a head's state through all tokens: it is stored behind the last committed one, and read
    for each new one. `strength` is the column that betas are made of."""
    scale, norm_eps = norm
    rows, columns = vectors
    p_gate, p_output, own_stride = own
    num_folded, num_places = stream[4], stream[5]
    last = gl.minimum(num_folded, num_places - 1)
    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    b_in = gl.load(row_of(stream, 0) + strength, mask=num_places > 0, other=0.0)
    for place in range(num_places):
        new, is_new = place - num_folded, place >= num_folded
        gate = gl.load(p_gate + new * own_stride, mask=is_new, other=0.0)
        beta = sigmoid(b_in)
        b_in = gl.load(row_of(stream, gl.minimum(place + 1, num_places - 1)) + strength)
        key, value = load_rows(rows.index(PLACES + place)), columns.index(place)
        state *= load_rows(rows.index(2 * PLACES + place))
        state = delta_rule(state, key, value.load(gl.SliceLayout(0, STATE)), beta)
        if place == last:
            gl.store(written + o_k[:, None] * SIZE + o_v[None, :], state)
        if is_new:
            x = read_rows(state, load_rows(rows.index(place)))
            x *= rms_scale(x, norm_eps, SIZE) * scale
            x = x / (1 + gl.exp(-gate.to(gl.float32)))
            gl.store(p_output + new * own_stride, x.to(p_output.dtype.element_ty))
