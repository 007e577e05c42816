"""Prepared images are kept by what they were made of, within a number of bytes."""

from milepost.engine.media.prepared import Prepared, PreparedPicture, Unprepared
from milepost.engine.media.preparing import KeptImages
from milepost.images import FrameSampling, ImageSettings
from milepost.runner.recording import PictureRecord


def prepared(num_bytes):
    record = PictureRecord(identity=bytes(16), rows=bytes(num_bytes), grid=(1, 2, 2))
    return Prepared((PreparedPicture(record, 1, 1),), ("",))


def test_the_images_used_last_are_kept():
    kept = KeptImages(max_bytes=100)
    keys = [b"%d" % number for number in range(3)]
    for key in keys[:2]:
        kept.put(key, prepared(40))
        kept.put(key, prepared(40))
    assert kept.get(keys[0])
    kept.put(keys[2], prepared(40))
    assert [kept.get(key) is None for key in keys] == [False, True, False]
    assert kept.num_bytes == 80
    kept.put(keys[1], prepared(101))
    assert kept.num_bytes == 0, "one that is larger than all that is kept is not"


def test_a_file_with_another_limit_is_another_image():
    own = ImageSettings()
    asked = [
        Unprepared(b"a", own),
        Unprepared(b"a", own, 100),
        Unprepared(b"b", own),
        Unprepared(b"a", own.with_pixels(None, 2**20)),
        Unprepared(b"a", own.with_pixels(32**2, None)),
        Unprepared(b"a", own, sampling=FrameSampling()),
        Unprepared(b"a", own, sampling=FrameSampling(fps=1)),
        Unprepared([b"a"], own, sampling=FrameSampling(), times=(0.0,)),
        Unprepared([b"a"], own, sampling=FrameSampling(), times=(1.0,)),
        Unprepared([b"ab", b"c"], own, sampling=FrameSampling(), times=(0.0, 1.0)),
        Unprepared([b"a", b"bc"], own, sampling=FrameSampling(), times=(0.0, 1.0)),
    ]
    assert len({each.find_key() for each in asked}) == len(asked)
