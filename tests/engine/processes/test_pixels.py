"""Pixels travel to the engine once, beside messages that are cut anywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from milepost.engine.processes.pixels import ReceivedPixels, SentPixels
from milepost.engine.processes.wire import Abort, Frames, SamePixels, ToEngine, frame
from milepost.runner.recording import PictureRecord

MAX_BYTES = 100
PICTURES = st.integers(0, 5).map(
    lambda number: PictureRecord(
        identity=bytes([number] * 16), rows=bytes([number]) * (20 * number), grid=(1, 2, 2)
    )
)


@given(st.lists(st.lists(PICTURES, max_size=4), max_size=8), st.lists(st.integers(0), max_size=6))
def test_each_request_has_its_pictures(requests, cuts):
    """Pictures come back after others took their place, and one is larger than all that is kept."""
    sent, received = SentPixels(MAX_BYTES), ReceivedPixels(MAX_BYTES)
    stream = b"".join(
        b"".join(sent.before(pictures)) + frame(Abort(number))
        for number, pictures in enumerate(requests)
    )
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    frames: Frames = Frames(ToEngine)
    found = []
    for start, end in pairwise(places):
        for message in frames.feed(stream[start:end]):
            if isinstance(message, Abort):
                assert message.number == len(found)
                found.append(received.of_request())
            else:
                received.take(message)
    assert found == [tuple(pictures) for pictures in requests]


def test_a_picture_that_the_engine_still_has_is_not_sent_again():
    record = PictureRecord(identity=bytes(16), rows=bytes(64), grid=(1, 2, 2))
    sent = SentPixels(MAX_BYTES)
    assert record.rows in list(sent.before([record]))
    assert list(sent.before([record])) == [frame(SamePixels(record.identity))]
