"""What Hopper's verify kernels read of a sequence's tokens and leave of them, run in numpy: Gluon
has no interpreter.
"""

from __future__ import annotations

import itertools
import types
from pathlib import Path

import numpy as np
import pytest

from milepost import kernels

CHANNELS, TAPS = 3, 4
STEP = 8


class Memory:
    """A pointer to some of an array's numbers."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at
        self.dtype = types.SimpleNamespace(element_ty=values.dtype)

    def __add__(self, distance):
        return Memory(self.values, self.at + distance)


class Number(np.ndarray):
    """With the method that casts."""

    def to(self, dtype):
        return self.astype(dtype).view(Number)


def load(pointer, mask=True, other=0.0):
    at, mask = np.broadcast_arrays(pointer.at, mask)
    found = np.where(mask, pointer.values[np.where(mask, at, 0)], other)
    return found.astype(pointer.values.dtype).view(Number)


def store(pointer, values, mask=True):
    at, values, mask = np.broadcast_arrays(pointer.at, values, mask)
    pointer.values[at[mask]] = values[mask]


def where(condition, first, second):
    if isinstance(first, Memory):
        return first if condition else second
    return np.where(condition, first, second).view(Number)


GL = types.SimpleNamespace(
    constexpr=lambda value: value,
    float32=np.float32,
    load=load,
    store=store,
    where=where,
    minimum=min,
    exp=np.exp,
    static_range=range,
    SwizzledSharedLayout=lambda *_: None,
    DistributedLinearLayout=lambda **_: None,
)


@pytest.fixture(scope="module")
def stream_gluon():
    """The module with numpy in place of Gluon."""
    path = Path(kernels.__file__).parent / "recurrent" / "hopper" / "stream.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    own = [line for line in lines if not line.startswith(("from triton", "from milepost"))]
    jit = types.SimpleNamespace(jit=lambda function: function)
    namespace = {"gl": GL, "gluon": jit, "STATE": None, "STATE_SIZE": 128}
    exec(compile("\n".join(own), path, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


@pytest.mark.parametrize("num_drafts", [3, 20])
def test_a_step_reads_and_leaves_what_one_token_at_a_time_does(stream_gluon, num_drafts):
    """In steps of STEP tokens, and where the state that is read is the one that is written."""
    most = num_drafts + 1
    step = min(STEP, 2 * num_drafts + 1)
    random = np.random.default_rng(0)
    channel = np.arange(CHANNELS)
    for num_folded, num_new in itertools.product(range(most), range(most + 1)):
        if not num_folded + num_new:
            continue
        state = random.normal(size=(CHANNELS, TAPS - 1)).astype(np.float32)
        records = random.normal(size=(num_drafts, CHANNELS + 2)).astype(np.float32)
        tokens = random.normal(size=(most, CHANNELS + 1)).astype(np.float32)
        inputs = np.concatenate((state.T, records[:num_folded, :CHANNELS], tokens[:num_new, :-1]))
        wanted_records = records.copy()
        wanted_records[: max(num_new - 1, 0), :CHANNELS] = tokens[1:num_new, :CHANNELS]
        end = num_folded + min(num_new, 1) + TAPS - 1
        wanted_state = inputs[end - TAPS + 1 : end].T

        num_places = num_folded + num_new
        flat, kept = records.reshape(-1), state.reshape(-1)
        rows = Memory(tokens.reshape(-1)), CHANNELS + 1, Memory(flat), CHANNELS + 2
        stream = stream_gluon.TokenStream(*rows, num_folded, num_places)
        for begin in range(0, num_places, step):
            own = stream, Memory(kept), channel, begin
            rows = stream_gluon.load_inputs(*own, begin == 0, TAPS, step)
            left = min(step, num_places - begin)
            expected = inputs[begin : begin + TAPS - 1 + left]
            assert np.array_equal(rows[: TAPS - 1 + left], expected), (num_folded, num_new)
            stream_gluon.leave_inputs(rows, *own, TAPS, step)
        assert np.array_equal(kept.reshape(CHANNELS, -1), wanted_state), (num_folded, num_new)
        assert np.array_equal(flat.reshape(records.shape), wanted_records), (num_folded, num_new)
