"""Videos in MP4 and WebM files: frames against those of transformers' reader, and hostile files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import read_video_opencv

from milepost.errors import InvalidPromptError
from milepost.images import FrameSampling, ImageSettings, containers
from milepost.images.containers import VideoFile
from milepost.images.headers import container_of
from milepost.images.videos import prepare_file, prepare_video
from tests.images.pictures import damaged, pixels

cv2 = pytest.importorskip("cv2")

SMALL = ImageSettings(min_pixels=4_096, max_pixels=65_536)
KINDS = {"mp4": "mp4v", "webm": "VP80", "mkv": "VP90"}
OWN = re.compile(
    r"the (MP4|WebM) video of \d+ bytes cannot be decoded: it is damaged, cut short, .+"
    r"|the (image|video) (has|is|begins) .+: .+"
)


def video(
    folder: Path,
    kind: str,
    count: int,
    rate: float,
    size: tuple[int, int],
    fourcc: str | None = None,
) -> bytes:
    """Writes frames of (height, width) of changing colours."""
    path = folder / f"video.{kind}"
    codec = cv2.VideoWriter_fourcc(*(fourcc or KINDS[kind]))
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, codec, rate, size[::-1])
    for seed in range(count):
        writer.write(pixels(*size, seed))
    writer.release()
    return path.read_bytes()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(kind: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return video(tmp_path_factory.mktemp("videos"), kind, 37, 12.5, (48, 80))


@pytest.mark.parametrize(("fps", "most"), [(2, 768), (5, 768), (2, 5), (30, 768)])
def test_frames_are_those_that_transformers_takes(
    made: bytes, tmp_path: Path, fps: float, most: int
) -> None:
    path = tmp_path / "video"
    path.write_bytes(made)
    own = SimpleNamespace(fps=fps, min_frames=4, max_frames=most)
    frames, metadata = read_video_opencv(
        str(path), lambda metadata: Qwen3VLVideoProcessor.sample_frames(own, metadata)
    )
    times = metadata.timestamps
    expected = prepare_video([Image.fromarray(frame) for frame in frames], times, SMALL)
    parts = prepare_file(made, SMALL, FrameSampling(fps=fps, max_frames=most))
    seconds = Qwen3VLProcessor._calculate_timestamps(
        None, metadata.frames_indices.tolist(), metadata.fps, 2
    )
    assert [part.seconds for part in parts] == pytest.approx(seconds)
    assert [part.text for part in parts] == [part.text for part in expected]
    for part, wanted in zip(parts, expected, strict=True):
        assert part.image.grid == wanted.image.grid
        assert np.array_equal(part.image.rows, wanted.image.rows)


def test_frames_are_counted_if_the_header_names_none_or_too_many(
    made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files are that a browser has recorded, or whose count is estimated from their duration."""
    expected = prepare_file(made, SMALL, FrameSampling())
    for count in (-(2.0**63), 0.0):
        monkeypatch.setattr(cv2, "VideoCapture", naming(count, cv2.VideoCapture))
        parts = prepare_file(made, SMALL, FrameSampling())
        assert [part.image.identity for part in parts] == [each.image.identity for each in expected]
        assert [part.seconds for part in parts] == pytest.approx(
            [each.seconds for each in expected], abs=0.02
        )
        monkeypatch.undo()
    monkeypatch.setattr(cv2, "VideoCapture", naming(39.0, cv2.VideoCapture))
    parts = prepare_file(made, SMALL, FrameSampling())
    assert parts[-1].image.identity == expected[-1].image.identity
    monkeypatch.undo()
    monkeypatch.setattr(cv2, "VideoCapture", naming(60.0, cv2.VideoCapture))
    with pytest.raises(InvalidPromptError, match="cut short"):
        prepare_file(made, SMALL, FrameSampling())


def naming(count: float, capture: object) -> object:
    """Returns OpenCV's reader of a file that names this number of frames."""

    class Named:
        def __init__(self, *how: object) -> None:
            self._own = capture(*how)

        def get(self, name: int) -> float:
            return count if name == cv2.CAP_PROP_FRAME_COUNT else self._own.get(name)

        def __getattr__(self, name: str) -> object:
            return getattr(self._own, name)

    return Named


def test_damaged_files_give_frames_or_an_error_of_ours(made: bytes) -> None:
    errors = [error_of(damaged(made, seed)) for seed in range(60)]
    errors += [error_of(made[:size]) for size in range(0, len(made), len(made) // 12)]
    assert sum(error is not None for error in errors) > len(errors) // 8


def error_of(data: bytes) -> str | None:
    try:
        prepare_file(data, SMALL, FrameSampling())
    except InvalidPromptError as refusal:
        error = str(refusal)
    else:
        return None
    assert OWN.fullmatch(error), error
    return error


def test_pixels_of_all_frames_are_counted_before_frames_are_read(
    made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidPromptError, match="80 x 48 pixels: at most 3839 are decoded"):
        VideoFile(made, 80 * 48 - 1)
    monkeypatch.setattr(containers, "_VIDEO_TIMES", 36)
    with pytest.raises(InvalidPromptError, match="37 frames of 80 x 48 pixels: at most 36 of this"):
        VideoFile(made, 80 * 48)


def test_a_video_of_one_frame_is_an_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidPromptError, match="send it as an image"):
        VideoFile(video(tmp_path, "mp4", 1, 10, (48, 80)))


def test_only_listed_formats_and_codecs_are_opened(
    kind: str, made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg also reads lists of other files and addresses."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(made)
    start = b"\0\0\0\x10ftypisom\0\0\0\0"
    for data in (
        b"#EXTM3U\n#EXTINF:1,\nfile://" + str(secret).encode(),
        b"ffconcat version 1.0\nfile " + str(secret).encode(),
        start + b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    ):
        with pytest.raises(InvalidPromptError):
            prepare_file(data, SMALL, FrameSampling())
    with monkeypatch.context() as patch:
        for container in ("MP4", "WebM"):
            patch.setitem(containers._FORMATS, container, "avi")
        with pytest.raises(InvalidPromptError, match="cannot be decoded"):
            VideoFile(made)
    motion_jpeg = video(tmp_path, "mkv", 9, 10, (48, 80), fourcc="MJPG")
    with pytest.raises(InvalidPromptError, match="its codec is none of"):
        VideoFile(motion_jpeg)
    before = dict(os.environ)
    assert VideoFile(made).num_frames == 37
    assert dict(os.environ) == before


def test_containers_are_known_by_their_first_bytes(kind: str, made: bytes) -> None:
    assert container_of(made) == ("MP4" if kind == "mp4" else "WebM")
    head = b"\0\0\0\x18ftyp%smp42\0\0\0\0isom"
    assert container_of(head % b"qt  ") == "MP4"
    for other in (b"", b"GIF89a", head % b"avif", head % b"heic", head[:20] % b"mp42"):
        assert container_of(other) is None
    assert container_of(b"\x7f\0\0\x18" + made[4:]) is None or kind != "mp4"


def test_without_opencv_a_video_is_refused_by_name(
    made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "can_decode", lambda: False)
    with pytest.raises(InvalidPromptError, match=r"OpenCV, which decodes it, is missing: .*videos"):
        prepare_file(made, SMALL, FrameSampling())
