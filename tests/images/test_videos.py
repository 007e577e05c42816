"""Videos as frames: sizes and times against transformers' own, rows against those of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)

from milepost.errors import ConfigError, InvalidPromptError
from milepost.images import (
    FrameSampling,
    ImageSettings,
    prepare,
    read_frame_sampling,
    read_video_settings,
)
from milepost.images.videos import _fit, prepare_animation, prepare_video
from tests.images.pictures import encoded, picture
from tests.pictured_chat import animation

SMALL = ImageSettings(min_pixels=4_096, max_pixels=65_536)
sides = st.integers(1, 1500)


@settings(max_examples=200)
@given(sides, sides, st.integers(2, 700), st.sampled_from([65_536, 25_165_824]))
def test_sizes_equal_those_of_the_reference(
    height: int, width: int, num_frames: int, max_pixels: int
) -> None:
    own = ImageSettings(min_pixels=4_096, max_pixels=max_pixels)
    try:
        expected = smart_resize(num_frames, height, width, 2, 32, 4_096, max_pixels)
    except ValueError:
        with pytest.raises(InvalidPromptError, match="one side may be at most 200 times"):
            _fit(height, width, num_frames, own)
        return
    assert _fit(height, width, num_frames, own) == expected


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_times_equal_those_of_the_reference(count: int) -> None:
    frames, times = [picture(40, 60, seed) for seed in range(count)], np.arange(count) * 0.52
    indices, fps = list(range(count)), 1 / 0.52
    expected = Qwen3VLProcessor._calculate_timestamps(None, indices, fps, 2)
    parts = prepare_video(frames, times.tolist(), SMALL)
    assert [part.seconds for part in parts] == pytest.approx(expected)
    assert [part.text for part in parts] == [f"<{each:.1f} seconds>" for each in expected]


def test_a_group_of_frames_is_one_picture_with_both_in_its_rows() -> None:
    frames = [picture(64, 96, seed) for seed in range(3)]
    parts = prepare_video([encoded(each) for each in frames], [0.0, 0.5, 1.0], SMALL)
    alone = [prepare(each, SMALL) for each in frames]
    assert len(parts) == 2
    for part, pair in zip(parts, ((0, 1), (2, 2)), strict=True):
        rows = part.image.rows.reshape(len(alone[0].rows), 3, 2, -1)
        assert part.image.grid == alone[0].grid
        assert part.image.num_tokens == alone[0].num_tokens == 6
        for frame, index in enumerate(pair):
            expected = alone[index].rows.reshape(len(rows), 3, -1)
            assert np.array_equal(rows[:, :, frame], expected)


def test_the_limits_are_those_of_all_frames_together() -> None:
    frames, times = [picture(256, 256, seed) for seed in range(8)], [float(t) for t in range(8)]
    parts = prepare_video(frames, times, SMALL)
    assert sum(part.image.num_tokens for part in parts) * 2 * 1024 <= SMALL.max_pixels


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        ([(40, 40)], [0.0], "has 1 frames: use 2 to 768, or an image"),
        ([(40, 40)] * 769, [0.0] * 769, "has 769 frames"),
        ([(40, 40)] * 3, [0.0], "3 frames and 1 times"),
        ([(40, 40), (40, 41)], [0.0, 1.0], "frames of 40 x 40 and of 41 x 40 pixels"),
    ],
)
def test_what_is_no_video_is_refused(
    sizes: list[tuple[int, int]], times: list[float], words: str
) -> None:
    with pytest.raises(InvalidPromptError, match=words):
        prepare_video([picture(*size) for size in sizes], times, SMALL)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize(("count", "ms"), [(3, 100), (9, 250), (50, 40), (40, 500)])
def test_frames_of_an_animation_are_those_of_the_reference(kind: str, count: int, ms: int) -> None:
    frames = [picture(40, 60, seed).quantize(64).convert("RGB") for seed in range(count)]
    metadata = SimpleNamespace(total_num_frames=count, fps=1000 / ms)
    own = SimpleNamespace(fps=2, min_frames=4, max_frames=24)
    chosen = Qwen3VLVideoProcessor.sample_frames(own, metadata).tolist()
    sampling = FrameSampling(max_frames=24)
    parts = prepare_animation(animation(frames, ms, kind), SMALL, sampling)
    times = [index * ms / 1000 for index in chosen]
    expected = prepare_video([frames[index] for index in chosen], times, SMALL)
    assert [part.seconds for part in parts] == pytest.approx([each.seconds for each in expected])
    assert [part.image.grid for part in parts] == [part.image.grid for part in expected]
    for part, wanted in zip(parts, expected, strict=True):
        assert kind == "GIF" or np.array_equal(part.image.rows, wanted.image.rows)


@given(st.integers(2, 5000), st.floats(0.02, 5000), st.floats(0.1, 60))
def test_as_many_frames_are_taken_as_by_the_reference(count: int, end_s: float, fps: float) -> None:
    own = SimpleNamespace(fps=fps, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=count, fps=count / end_s)
    expected = Qwen3VLVideoProcessor.sample_frames(own, metadata).tolist()
    assert FrameSampling(fps=fps).chosen(count, count / end_s) == expected


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encoded(picture(40, 60)), "is a PNG file of one picture: send it as an image"),
        (encoded(picture(40, 60), "JPEG"), "is a JPEG file of one picture"),
        (b"\0\0\0\x18ftypmp42", "is a MP4 file: supported are PNG"),
        (animation([picture(30, 30, seed) for seed in range(9)], 100)[:-900], "cut short"),
        (b"GIF89a" + b"\xff" * 50, "cut short"),
    ],
)
def test_what_is_no_animation_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidPromptError, match=words):
        prepare_animation(data, SMALL, FrameSampling())


def test_pixels_of_all_frames_are_counted_before_any_are_decoded() -> None:
    data = animation([picture(40, 60, seed) for seed in range(17)], 100)
    with pytest.raises(InvalidPromptError, match="17 frames of 60 x 40 pixels: at most 38400 pix"):
        prepare_animation(data, SMALL, FrameSampling(), max_decoded=2400)
    with pytest.raises(InvalidPromptError, match="60 x 40 pixels: at most 2399 are decoded"):
        prepare_animation(data, SMALL, FrameSampling(), max_decoded=2399)


def test_settings_of_videos_are_read(tmp_path: Path) -> None:
    own = read_video_settings(tmp_path)
    assert (own.min_pixels, own.max_pixels) == (4096, 25_165_824)
    published = {
        "size": {"longest_edge": 1_000_000, "shortest_edge": 5000},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": published}))
    assert read_video_settings(tmp_path).max_pixels == 1_000_000
    flat = published | {"video_processor_type": "Another"}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(flat))
    with pytest.raises(ConfigError, match="video_processor_type='Another'"):
        read_video_settings(tmp_path)
    flat |= {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 1, "max_frames": 8}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(flat))
    assert read_frame_sampling(tmp_path) == FrameSampling(fps=1, max_frames=8)
    for own, words in (({"fps": 0}, "fps=0"), ({"cap_pixels_per_frame": True}, "cap_pixels")):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(flat | own))
        with pytest.raises(ConfigError, match=words):
            read_frame_sampling(tmp_path)
