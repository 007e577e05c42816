"""Images and videos before and after they are prepared, as processes send them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from milepost.checks import is_number
from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.given import Given, shown
from milepost.engine.media.urls import decoded, pieces_of
from milepost.errors import InvalidPromptError
from milepost.images.settings import MAX_FRAMES, FrameSampling, ImageSettings
from milepost.runner.recording import PictureRecord

if TYPE_CHECKING:
    from milepost.images import PreparedImage


class PreparedPicture(msgspec.Struct, array_like=True, frozen=True):
    """One picture as the tower reads it."""

    record: PictureRecord
    num_tokens: int
    num_positions: int


class Prepared(msgspec.Struct, array_like=True, frozen=True, tag="prepared"):
    """An image or a video as the tower reads it. An image is one picture, or one for each tile; a
    video is one for each group of frames."""

    pictures: tuple[PreparedPicture, ...]
    texts: tuple[str, ...]
    """The text before each picture."""
    is_video: bool = False

    @staticmethod
    def of(parts: Iterable[tuple[PreparedImage, str]], *, is_video: bool = False) -> Prepared:
        """Takes over pictures with the texts before them."""
        images, texts = zip(*parts, strict=True)
        return Prepared(tuple(map(_taken_over, images)), texts, is_video)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the pictures, without those of the texts."""
        return sum(each.num_tokens for each in self.pictures)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the pictures' pixels."""
        return sum(each.record.num_bytes for each in self.pictures)


def _taken_over(image: PreparedImage) -> PreparedPicture:
    record = PictureRecord(identity=image.identity, rows=image.rows.tobytes(), grid=image.grid)
    return PreparedPicture(record, image.num_tokens, image.num_positions)


class Unprepared(msgspec.Struct, array_like=True, frozen=True):
    """An image or a video to prepare."""

    data: Any
    """A file, as bytes or as a data: URL, or an image of Pillow's; or the frames of a video, in a
    list."""
    settings: ImageSettings
    max_pixels: int | None = None
    sampling: FrameSampling | None = None
    """Set for a video: which frames to take of an animation."""
    times: tuple[float, ...] = ()
    """Seconds of each frame, if they are in a list."""

    @property
    def name(self) -> str:
        return "an image" if self.sampling is None else "a video"

    @staticmethod
    def of(given: Given, loaded: Sequence[Any], facts: ImageFacts) -> Unprepared:
        """Returns an image or a video to prepare; `loaded` has the contents of its `sources_of`.
        Raises InvalidPromptError."""
        if not given.is_video:
            max_pixels = facts.low_pixels if given.is_low else None
            return Unprepared(loaded[0], facts.settings, max_pixels)
        video = facts.video
        assert video is not None, "videos are refused before"
        if not isinstance(given.source, Mapping):
            return Unprepared(loaded[0], video.settings, sampling=video.sampling)
        times = _times_of(given.source, len(loaded))
        return Unprepared(list(loaded), video.settings, sampling=video.sampling, times=times)

    def find_key(self) -> bytes | None:
        """Returns a hash of everything that the result depends on; None if Pillow images are among
        it."""
        files = self.data if isinstance(self.data, list) else [self.data]
        if not all(isinstance(each, bytes | str) for each in files):
            return None
        sizes = [(type(each).__name__, len(each)) for each in files]
        facts = self.settings, self.max_pixels, self.sampling, self.times, sizes
        digest = blake2b(repr(facts).encode(), digest_size=32)
        for each in files:
            for piece in pieces_of(each) if isinstance(each, str) else (each,):
                digest.update(piece)
        return digest.digest()

    def prepared(self) -> Prepared:
        """Prepares it in this process. Raises InvalidPromptError."""
        from milepost.images import prepare
        from milepost.images.tiles import prepare_tiles
        from milepost.images.videos import prepare_file, prepare_video

        data: Any = list(map(_file, self.data)) if isinstance(self.data, list) else _file(self.data)
        if self.sampling is None and self.settings.is_tiled:
            tiles = prepare_tiles(data, self.settings, max_pixels=self.max_pixels)
            return Prepared.of((tile.image, tile.label) for tile in tiles)
        if self.sampling is None:
            return Prepared.of([(prepare(data, self.settings, max_pixels=self.max_pixels), "")])
        if isinstance(data, list):
            groups = prepare_video(data, self.times, self.settings)
        elif isinstance(data, bytes):
            groups = prepare_file(data, self.settings, self.sampling)
        else:
            raise InvalidPromptError(
                f"a video of type {type(data).__name__}: use a URL, a file's bytes, or "
                '{"frames": [...], "fps": 2}'
            )
        return Prepared.of(((group.image, group.text) for group in groups), is_video=True)


def _file(data: Any) -> Any:
    return decoded(data) if isinstance(data, str) else data


def sources_of(given: Given) -> list[Given]:
    """Returns what must be loaded: the image itself, or the frames of the video. Raises
    InvalidPromptError."""
    if not (given.is_video and isinstance(given.source, Mapping)):
        return [given]
    frames = given.source.get("frames")
    if not isinstance(frames, list | tuple) or not 1 <= len(frames) <= MAX_FRAMES:
        raise InvalidPromptError(
            f'a video whose frames are no list of 1 to {MAX_FRAMES}: use {{"frames": [...], '
            '"fps": 2}, or "times" in seconds'
        )
    return [Given(frame) for frame in frames]


def _times_of(source: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """Returns the times of frames in seconds, from the list `times` or from `fps`."""
    times: Any = source.get("times")
    fps: Any = source.get("fps")
    if times is None and is_number(fps) and fps > 0:
        return tuple(index / fps for index in range(count))
    is_list = isinstance(times, list | tuple) and len(times) <= MAX_FRAMES
    if not is_list or not all(map(is_number, times)) or any(not 0 <= each < 1e6 for each in times):
        raise InvalidPromptError(
            f"a video of {count} frames with times={shown(times)} and fps={shown(fps)}: use one "
            "time for each, in seconds, or the frames a second"
        )
    return tuple(map(float, times))
