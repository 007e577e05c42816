"""H.264 and H.265 in MP4 files as phones write them: what was written comes back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import read_video_opencv

from milepost.errors import InvalidPromptError
from milepost.images import FrameSampling, ImageSettings
from milepost.images.containers import VideoFile
from milepost.images.headers import shown_share
from milepost.images.videos import prepare_file
from tests.images.mp4 import Track, mp4
from tests.images.pcm_video import Colour, Planes, Stream, h264, h265
from tests.images.test_containers import error_of

pytest.importorskip("cv2")

SMALL = ImageSettings(min_pixels=4_096, max_pixels=65_536)
GREY = Colour(is_full=True, matrix=1)
MOST = 2**32 - 1
Coder = Callable[..., Stream]


@pytest.fixture(params=[h264, h265], ids=["h264", "h265"])
def code(request: pytest.FixtureRequest) -> Coder:
    return request.param


def grey(height: int, width: int, seed: int) -> Planes:
    """Returns noise without a colour: with the full range it is R, G and B as it is."""
    luma = np.random.default_rng(seed).integers(0, 256, (height, width)).astype(np.uint8)
    flat = np.full((height // 2, width // 2), 128, np.uint8)
    return luma, flat, flat


FRAMES = [grey(30, 50, seed) for seed in range(6)]


def shown(data: bytes) -> tuple[list[NDArray[np.uint8]], VideoFile]:
    """Returns all frames of a file, and the file."""
    video = VideoFile(data)
    return [np.asarray(frame) for frame in video.frames(range(video.num_frames))], video


def indices(frames: list[NDArray[np.uint8]]) -> list[int]:
    """Returns which of FRAMES these are."""
    return [
        next(index for index, each in enumerate(FRAMES) if np.array_equal(frame[..., 1], each[0]))
        for frame in frames
    ]


@pytest.mark.parametrize("size", [(16, 16), (30, 50), (90, 162), (48, 18)])
def test_pixels_come_back_as_they_were_written(code: Coder, size: tuple[int, int]) -> None:
    """Sides that are no multiples of a block are cropped."""
    written = [grey(*size, seed) for seed in range(3)]
    frames, video = shown(mp4(code(written, GREY), Track(timescale=90_000, durations=(3003,))))
    assert video.rate == pytest.approx(29.97, abs=0.001)
    assert len(frames) == 3
    for frame, (luma, _, _) in zip(frames, written, strict=True):
        assert np.array_equal(frame, np.repeat(luma[..., None], 3, axis=2))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("matrix", [1, 2, 5, 6])
@pytest.mark.parametrize("sample", [(150, 90, 180), (60, 140, 110), (200, 120, 130)])
def test_colours_are_those_that_the_stream_names(
    code: Coder, is_full: bool, matrix: int, sample: tuple[int, int, int]
) -> None:
    """Range, and BT.709 or BT.601; the latter where a stream says nothing, as FFmpeg has it."""
    red, blue = (0.2126, 0.0722) if matrix == 1 else (0.299, 0.114)
    y, cb, cr = sample
    luma, scale = (y / 255, 255) if is_full else ((y - 16) / 219, 224)
    r = luma + 2 * (1 - red) * (cr - 128) / scale
    b = luma + 2 * (1 - blue) * (cb - 128) / scale
    expected = 255 * np.array([r, (luma - red * r - blue * b) / (1 - red - blue), b])
    planes = [
        np.full((32 // part, 48 // part), each, np.uint8)
        for part, each in zip((1, 2, 2), sample, strict=True)
    ]
    frames, _ = shown(mp4(code([tuple(planes)] * 2, Colour(is_full=is_full, matrix=matrix))))
    assert np.abs(frames[1][16, 24] - expected.clip(0, 255)).max() < 2


def test_frames_and_times_are_those_of_the_reference(code: Coder, tmp_path: Path) -> None:
    written = [grey(64, 96, seed) for seed in range(25)]
    data = mp4(code(written, GREY), Track(timescale=600, durations=(50, 20, 90, 40)))
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    expected, metadata = read_video_opencv(
        str(path), lambda metadata: Qwen3VLVideoProcessor.sample_frames(own, metadata)
    )
    parts = prepare_file(data, SMALL, FrameSampling())
    times = list(metadata.timestamps)
    times += times[-1:] * (len(times) % 2)
    pairs = zip(times[::2], times[1::2], strict=True)
    assert [part.seconds for part in parts] == pytest.approx([sum(pair) / 2 for pair in pairs])
    frames = list(VideoFile(data).frames(metadata.frames_indices.tolist()))
    assert np.array_equal(np.stack([np.asarray(frame) for frame in frames]), expected)


def test_frames_of_variable_length_are_all_there(code: Coder) -> None:
    """A frame's time is its number divided by the mean rate, as transformers' reader has it."""
    data = mp4(code(FRAMES, GREY), Track(durations=(100, 300, 100, 900, 50, 50)))
    frames, video = shown(data)
    assert indices(frames) == [0, 1, 2, 3, 4, 5]
    assert video.rate == pytest.approx(6 / 1.5)


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_what_was_filmed_in_portrait_is_upright(code: Coder, turn: int) -> None:
    frames, _ = shown(mp4(code(FRAMES, GREY), Track(turn=turn)))
    upright = [np.rot90(luma, -turn // 90) for luma, _, _ in FRAMES]
    assert all(np.array_equal(a[..., 0], b) for a, b in zip(frames, upright, strict=True))
    parts = prepare_file(mp4(code(FRAMES, GREY), Track(turn=turn)), SMALL, FrameSampling())
    _, rows, columns = parts[0].image.grid
    assert (rows > columns) == (turn in (90, 270))


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([(3000, 0)], [0, 1, 2, 3, 4, 5]),
        ([(2000, 1000)], [2, 3, 4, 5]),
        ([(1500, 0)], [0, 1, 2]),
        ([(1250, 750)], [2, 3]),
        ([(1000, -1), (3000, 0)], [0, 1, 2, 3, 4, 5]),
        ([(500, 0), (500, 2000)], [0, 4]),
    ],
)
def test_a_trimmed_video_is_what_players_show_of_it(
    code: Coder, edits: list[tuple[int, int]], expected: list[int]
) -> None:
    """Phones trim a video by an edit list, and leave all frames in the file."""
    data = mp4(code(FRAMES, GREY), Track(edits=edits))
    frames, video = shown(data)
    assert indices(frames) == expected
    assert video.num_frames == len(expected)
    seconds = [part.seconds for part in prepare_file(data, SMALL, FrameSampling())]
    whole = [index / 2 for index in range(len(expected))]
    whole += whole[-1:] * (len(whole) % 2)
    assert seconds == [(a + b) / 2 for a, b in zip(whole[::2], whole[1::2], strict=True)]


def test_a_video_without_most_of_its_frames_is_cut_short_for_all_its_edits(code: Coder) -> None:
    stream = code(FRAMES, GREY)
    sizes = [len(each) for each in stream.samples[:2]] + [10**6] * 4
    lying = {b"stsz": bytes(4) + struct.pack(">II6I", 0, 6, *sizes)}
    for edits in ([], [(3000, 0)], [(2500, 0)]):
        with pytest.raises(InvalidPromptError, match="cut short"):
            shown(mp4(stream, Track(edits=edits, tables=lying)))


def test_the_share_of_a_video_that_is_shown() -> None:
    stream = h264(FRAMES, GREY)
    assert shown_share(mp4(stream)) == 1
    assert shown_share(mp4(stream, Track(edits=[(500, -1), (600, 0), (300, 9)]))) == 0.3
    assert shown_share(mp4(stream, Track(edits=[(9000, 0)]))) == 1
    assert shown_share(mp4(stream, Track(timescale=250, edits=[(6000, 0)]))) == 0.5
    for damaged in (b"", b"\0\0\0\1moov", mp4(stream, Track(timescale=0, edits=[(600, 0)]))):
        assert shown_share(damaged) == 1


def lying(**tables: bytes) -> Track:
    return Track(tables={kind.encode(): bytes(4) + body for kind, body in tables.items()})


HOSTILE = {
    "2^32 frames": lying(stsz=struct.pack(">II", 100, MOST)),
    "2^32 empty frames": lying(stsz=struct.pack(">II", 0, MOST)),
    "frames past the limit": lying(
        stsz=struct.pack(">II", 1, 10**8),
        stts=struct.pack(">III", 1, 10**8, 1),
        stsc=struct.pack(">IIII", 1, 1, 10**8, 1),
    ),
    "sizes past the end": lying(stsz=struct.pack(">II6I", 0, 6, *[10**6] * 6)),
    "sizes of 2 GiB": lying(stsz=struct.pack(">II6I", 0, 6, *[2**31] * 6)),
    "sizes of nothing": lying(stsz=struct.pack(">II6I", 0, 6, *[0] * 6)),
    "an offset past the end": lying(stco=struct.pack(">II", 1, 10**8)),
    "an offset past 2 GiB": lying(stco=struct.pack(">II", 1, 2**31)),
    "an offset of 4 GiB": lying(stco=struct.pack(">II", 1, MOST)),
    "an offset into the header": lying(stco=struct.pack(">II", 1, 0)),
    "2^32 offsets": lying(stco=struct.pack(">II", MOST, 40)),
    "2^32 durations": lying(stts=struct.pack(">III", 1, MOST, 1000)),
    "a chunk of 2^32 frames": lying(stsc=struct.pack(">IIII", 1, 1, MOST, 1)),
    "chunks of none": lying(stsc=struct.pack(">IIII", 1, 0, 0, 0)),
    "a million frames a second": Track(timescale=10**6, durations=(1,)),
    "audio only": Track(handler=b"soun"),
    "edits past the end": Track(edits=[(MOST, 2**31 - 1)] * 50),
}
ODD = {
    "no durations": lying(stts=struct.pack(">III", 1, 6, 0)),
    "durations of days": lying(stts=struct.pack(">III", 1, 6, MOST)),
    "no timescale": Track(timescale=0),
    "thousands of edits": Track(edits=[(3000, 0)] * 5000),
    "another size in the track": Track(header_size=(65_535, 65_535)),
}
"""Tracks whose frames are all there."""


@pytest.mark.parametrize("name", HOSTILE)
def test_tables_that_lie_are_refused(name: str) -> None:
    assert error_of(mp4(h264(FRAMES, GREY), HOSTILE[name])) is not None


@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_cost_no_frame(name: str) -> None:
    frames, _ = shown(mp4(h264(FRAMES, GREY), ODD[name]))
    assert indices(frames) == [0, 1, 2, 3, 4, 5]


def test_a_file_that_was_cut_is_refused(code: Coder) -> None:
    whole = mp4(code(FRAMES, GREY))
    for end in range(30, len(whole), len(whole) // 20):
        assert error_of(whole[:end]) is not None


@pytest.mark.parametrize("side", [8_208, 16_384, 16_400])
def test_a_huge_frame_with_a_tiny_body_is_refused_before_it_is_decoded(
    code: Coder, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grabs = []
    monkeypatch.setattr(VideoFile, "frames", lambda *_: grabs.append(1))
    claimed = np.broadcast_to(np.uint8(0), (side, side))
    half = np.broadcast_to(np.uint8(0), (side // 2, side // 2))
    monkeypatch.setattr("tests.images.pcm_video._blocks", lambda _: [bytes(384)])
    data = mp4(code([(claimed, half, half)] * 3))
    assert len(data) < 3000
    assert error_of(data) is not None
    assert not grabs
