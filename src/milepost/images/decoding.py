"""Decodes pictures, which are untrusted input.

Formats are those of `headers`; each is opened by its own class of Pillow, so no other decoder is
ever reached. A picture's pixels are counted before any are decoded. Pillow's messages are not
repeated to callers. How long decoding takes is not bounded here: a process that can be ended does
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO

from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from milepost.errors import InvalidPromptError
from milepost.images.headers import format_of, webp_size

MAX_PIXELS = 2**26
"""Largest number of pixels that are decoded by default: 8192 x 8192. A pixel takes up to 16 bytes
meanwhile."""

_ANIMATION_TIMES = 16
_FRAME_S = 0.1
"""Seconds for which browsers show a frame of an animation that names no duration."""

_OPENERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}
_ORIENTATION = 0x0112
"""Tag of Exif 2.32, section 4.6.4."""
_TURNS: Mapping[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Exif orientation -> transposition that turns the picture upright."""


class Animation:
    """A file's pictures, opened by its own class of Pillow. Raises InvalidPromptError for a file of
    one picture, and for pictures of more than `max_pixels`, each or (at 16 times as many) together.
    """

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS) -> None:
        self._kind, self._num_bytes = format_of(data), len(data)
        with _decoding(self._kind, self._num_bytes):
            self._file = _opened(data, self._kind, max_pixels)
            self.num_frames = int(getattr(self._file, "n_frames", 1))
        self._max_pixels = max_pixels
        if self.num_frames < 2:
            raise InvalidPromptError(
                f"the video is a {_shown(self._kind)} file of one picture: send it as an image"
            )
        width, height = self._file.size
        if width * height * self.num_frames > _ANIMATION_TIMES * max_pixels:
            raise InvalidPromptError(
                f"the video has {self.num_frames} frames of {width} x {height} pixels: at most "
                f"{_ANIMATION_TIMES * max_pixels} pixels are decoded; make it smaller or shorter"
            )

    def frames(self) -> Iterator[tuple[Image.Image, float]]:
        """Yields each picture, upright and in RGB, with the seconds that it is shown."""
        for index in range(self.num_frames):
            with _decoding(self._kind, self._num_bytes):
                self._file.seek(index)
                self._file.load()
                refuse_size(self._file.size, self._max_pixels)
                shown, ms = upright(self._file), self._file.info.get("duration")
            yield shown, float(ms) / 1000 if ms else _FRAME_S


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Returns a file's picture, upright, in RGB; the first one of an animation. Raises
    InvalidPromptError for anything but a whole picture of at most `max_pixels`."""
    kind = format_of(data)
    with _decoding(kind, len(data)):
        picture = _opened(data, kind, max_pixels)
        picture.load()
        refuse_size(picture.size, max_pixels)  # a GIF's picture may be larger than its screen
        return upright(picture)


def _opened(data: bytes, kind: str, max_pixels: int) -> ImageFile.ImageFile:
    """Opens a file by the class of its format, and reads its header."""
    if kind == "WEBP":
        refuse_size(webp_size(data), max_pixels)
    file = _OPENERS[kind](BytesIO(data))
    refuse_size(file.size, max_pixels)
    return file


@contextmanager
def _decoding(kind: str, num_bytes: int) -> Iterator[None]:
    """Raises InvalidPromptError for whatever a decoder raises."""
    try:
        yield
    except InvalidPromptError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders of untrusted bytes fail in any way
        problem = "cannot be decoded: it is damaged or cut short"
        if isinstance(error, MemoryError):
            problem = "needs too much memory"
        raise InvalidPromptError(
            f"the {_shown(kind)} image of {num_bytes} bytes {problem}"
        ) from None


def open_picture(given: bytes | Image.Image, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Returns a file's picture, or one of Pillow's, as `decode` does."""
    if not isinstance(given, Image.Image):
        return decode(given, max_pixels)
    refuse_size(given.size, max_pixels)
    return upright(given)


def upright(picture: Image.Image) -> Image.Image:
    """Returns the picture turned as its Exif data says, in RGB, with transparency on white."""
    turn = _TURNS.get(_orientation(picture))
    return flatten(picture if turn is None else picture.transpose(turn))


def flatten(picture: Image.Image) -> Image.Image:
    """Returns the picture in RGB, with transparency on white."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    layered = picture.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def _orientation(picture: Image.Image) -> object:
    """Returns the picture's orientation, or None if its Exif data cannot be read."""
    try:
        return picture.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - the pixels are whole
        return None


def refuse_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raises InvalidPromptError for a picture of this width and height if it has no pixels, or more
    than `max_pixels`."""
    width, height = size
    if not width or not height:
        raise InvalidPromptError(f"the image has {width} x {height} pixels: it is damaged")
    if width * height > max_pixels:
        raise InvalidPromptError(
            f"the image has {width} x {height} pixels: at most {max_pixels} are decoded; make it "
            "smaller"
        )


def _shown(kind: str) -> str:
    return "WebP" if kind == "WEBP" else kind
