from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engine.processes.wire import (
    MAX_FRAME_BYTES,
    Abort,
    Add,
    Ask,
    Frames,
    Stop,
    ToEngine,
    frame,
)
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs

PARAMS = SamplingParams(
    stop=["a", "b"],
    stop_token_ids=[3],
    logit_bias={5: -1.5},
    seed=2**62,
    structured_outputs=StructuredOutputs(json={"type": "object"}),
)
PROMPT = Prompt(
    token_ids=[1, 2, 2**31],
    cache_salt="s",
    cache_marks=(1, 3),
    kv_transfer_params={"do_remote_decode": True},
)
MESSAGES = [
    Add.of(1, PROMPT, PARAMS, priority=-3),
    Abort(1),
    Ask(id=2, what="metrics"),
    Stop(),
]
STREAM = b"".join(frame(message) for message in MESSAGES)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_messages_come_whole_however_the_stream_is_cut(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    frames = Frames(ToEngine)
    found = [
        message for start, end in pairwise(places) for message in frames.feed(STREAM[start:end])
    ]
    assert found == MESSAGES


def test_a_prompt_arrives_as_it_was_sent():
    (message,) = Frames(ToEngine).feed(frame(MESSAGES[0]))
    found = message.prompt
    assert list(found.token_ids) == PROMPT.token_ids
    assert found.packed == PROMPT.packed
    for name in ("cache_salt", "cache_marks", "kv_transfer_params"):
        assert getattr(found, name) == getattr(PROMPT, name)


def test_values_are_checked_again_on_arrival():
    body = msgspec.msgpack.decode(frame(MESSAGES[0])[4:])
    body["params"]["temperature"] = -1
    bad = msgspec.msgpack.encode(body)
    with pytest.raises((InvalidRequestError, msgspec.ValidationError), match="temperature"):
        Frames(ToEngine).feed(len(bad).to_bytes(4, "big") + bad)


def test_a_stream_out_of_step_is_refused():
    with pytest.raises(ValueError, match="out of step"):
        Frames(ToEngine).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ValueError, match="type"):
        Frames(ToEngine).feed(frame({"type": "Nothing"}))
