"""Decodes pictures, which are untrusted input.

Formats are those of `headers`; each is opened by its own class of Pillow, so no other decoder is
ever reached. A picture's pixels are counted before any are decoded. Pillow's messages are not
repeated to callers. How long decoding takes is not bounded here: a process that can be ended does
that.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from milepost.errors import InvalidPromptError
from milepost.images.headers import format_of, webp_size

MAX_PIXELS = 2**26
"""Largest number of pixels that are decoded by default: 8192 x 8192. A pixel takes up to 16 bytes
meanwhile."""

_OPENERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}
_ORIENTATION = 0x0112
"""Tag of Exif 2.32, section 4.6.4."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Orientation -> how the picture is turned upright."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Returns a file's picture, upright, in RGB; the first one of an animation. Raises
    InvalidPromptError for anything but a whole picture of at most `max_pixels`."""
    kind = format_of(data)
    if kind == "WEBP":
        refuse_size(webp_size(data), max_pixels)
    try:
        picture = _OPENERS[kind](BytesIO(data))
        refuse_size(picture.size, max_pixels)
        picture.load()
        refuse_size(picture.size, max_pixels)  # a GIF's picture may be larger than its screen
        return upright(picture)
    except InvalidPromptError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders of untrusted bytes fail in any way
        raise _unreadable(kind, len(data), error) from None


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
    """Returns the picture in RGB, with what is transparent laid on white."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    own = picture.convert("RGBA")
    white = Image.new("RGBA", own.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, own).convert("RGB")


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


def _unreadable(kind: str, num_bytes: int, error: Exception) -> InvalidPromptError:
    name = "WebP" if kind == "WEBP" else kind
    if isinstance(error, MemoryError):
        return InvalidPromptError(f"the {name} image of {num_bytes} bytes needs too much memory")
    return InvalidPromptError(
        f"the {name} image of {num_bytes} bytes cannot be decoded: it is damaged or cut short"
    )
