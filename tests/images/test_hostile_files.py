"""Files that nobody would send by accident: each gives a picture or an error in our own words."""

from __future__ import annotations

import re
import struct
import zlib

import pytest
from PIL import Image, PngImagePlugin

from milepost.errors import InvalidPromptError
from milepost.images import ImageSettings, prepare
from milepost.images.decoding import MAX_PIXELS
from tests.images.pictures import FORMATS, damaged, encoded, picture

SMALL = ImageSettings(min_pixels=1_024, max_pixels=4_096)
OWN = re.compile(
    r"the (PNG|JPEG|WebP|GIF) image of \d+ bytes (cannot be decoded: it is damaged or cut short"
    r"|needs too much memory)|the image (has|is|begins) .+: .+"
)


def error_of(data: bytes) -> str | None:
    try:
        prepared = prepare(data, SMALL)
    except InvalidPromptError as refusal:
        error = str(refusal)
    else:
        assert 1 <= prepared.num_tokens <= 4
        return None
    assert OWN.fullmatch(error), error
    return error


def files(kind: str) -> list[bytes]:
    modes = {"PNG": ("RGB", "RGBA", "P", "L"), "JPEG": ("RGB", "L"), "WEBP": ("RGB", "RGBA")}
    made = [encoded(picture(30, 40, mode=mode), kind) for mode in modes.get(kind, ("P",))]
    if kind != "JPEG":
        frames = [picture(30, 40, seed) for seed in range(3)]
        made.append(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    if kind == "JPEG":
        made.append(encoded(picture(30, 40), kind, progressive=True))
    exif = Image.Exif()
    exif[0x0112] = 6
    return made if kind == "GIF" else [*made, encoded(picture(30, 40), kind, exif=exif)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_a_picture_or_an_error_of_ours(kind: str) -> None:
    errors = [
        error_of(damaged(data, 1000 * number + seed))
        for number, data in enumerate(files(kind))
        for seed in range(160 // len(files(kind)))
    ]
    assert sum(error is not None for error in errors) > len(errors) // 5
    assert sum(error is None for error in errors) > len(errors) // 20


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_files_cut_short_anywhere_are_refused_or_whole(kind: str) -> None:
    data = encoded(picture(30, 40), kind)
    errors = [error_of(data[:end]) for end in range(0, len(data) - 20, 1 + len(data) // 60)]
    assert None not in errors[: len(errors) // 2]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes(2**20))[:2000])
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + rows + chunk(b"IEND", b"")


def webp(kind: bytes, body: bytes) -> bytes:
    inside = b"WEBP" + kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(inside)) + inside


BOMBS = {
    "png": png(60_000, 60_000),
    "png_2_31": png(2**31 - 1, 2**31 - 1),
    "gif": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0\0;",
    "jpeg": (
        b"\xff\xd8\xff\xc0\0\x11\x08\xff\xdc\xff\xdc\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
        b"\xff\xda\0\x0c\x03\x01\0\x02\x11\x03\x11\0\x3f\0\xff\xd9"
    ),
    "webp": webp(b"VP8X", bytes(4) + b"\xff\x3f\0\xff\x3f\0"),
    "webp_lossless": webp(b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(20)),
    "webp_lossy": webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(20)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_pixels_are_counted_before_any_are_decoded(name: str) -> None:
    error = error_of(BOMBS[name])
    assert error is not None
    assert re.search(rf"has \d+ x \d+ pixels: at most {MAX_PIXELS} are decoded", error)


def test_a_gif_whose_picture_is_larger_than_its_screen_is_refused() -> None:
    data = bytearray(encoded(picture(30, 40, mode="P"), "GIF"))
    place = data.index(b",\0\0\0\0")
    data[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    assert error_of(bytes(data)) is not None


def test_text_that_unpacks_to_much_more_is_refused() -> None:
    data = encoded(picture(30, 40))
    header = data.index(b"IDAT") - 4

    def with_text(size: int) -> bytes:
        packed = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(size), 9))
        return data[:header] + packed + data[header:]

    assert error_of(with_text(1000)) is None
    assert error_of(with_text(2**22)) is not None


def test_pixels_are_limited() -> None:
    with pytest.raises(InvalidPromptError, match="has 8193 x 8192 pixels: at most 67108864 are"):
        prepare(encoded(Image.new("1", (2**13 + 1, 2**13))), SMALL)
    image = picture(30, 40)
    for given in (image, encoded(image)):
        assert prepare(given, SMALL, max_decoded=1200).num_tokens == 1
        with pytest.raises(InvalidPromptError, match="has 40 x 30 pixels: at most 1199 are decod"):
            prepare(given, SMALL, max_decoded=1199)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "AVIF", "JPEG2000", "PCX", "PPM", "TGA"])
def test_other_formats_are_refused_by_name(kind: str) -> None:
    error = error_of(encoded(picture(32, 32), kind))
    assert error is not None
    assert error.endswith("supported are PNG, JPEG, WebP and GIF; convert it")
    if kind in ("BMP", "TIFF", "ICO", "AVIF"):
        assert f"the image is a {kind} file" in error


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has no bytes"),
        (b"<svg xmlns=", "is a SVG file"),
        (b"%PDF-1.7", "is a PDF file"),
        (b"\0\0\0\x18ftypheic", "is a HEIC file"),
        (b"\0\0\0\x18ftypqt  ", "is a MP4 or another media container file"),
        (b"hello, world", "begins with the bytes 68656c6c6f2c2077, which are of no known format"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, words: str) -> None:
    assert words in str(error_of(data))


def test_only_the_first_picture_of_an_animation_is_taken() -> None:
    frames = [picture(30, 40, seed) for seed in range(3)]
    for kind in ("PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert prepare(data, SMALL).identity == prepare(frames[0], SMALL).identity


def test_text_in_a_picture_is_ignored() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * 1000)
    data = encoded(picture(30, 40), "PNG", pnginfo=info)
    assert prepare(data, SMALL).identity == prepare(picture(30, 40), SMALL).identity
