"""Cuts pictures into rows of patches, as the tower reads them, and identifies them.

Rows are uint8: the device normalises them by a table (`normalisation`), so only a twelfth of the
bytes of float32 rows are kept and sent. A still picture stands for both times of its patches, and
its row holds them once.

Legend: P patches, F frames of a row (one, or two different ones of a video), E pixels of a patch's
side.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from milepost.images import decoding
from milepost.images.resampling import PixelValues
from milepost.images.settings import ImageSettings
from milepost.images.sizes import num_tokens_of, resized

_VERSION = 1
"""Part of each identity. Increased if the same picture gets other rows."""
IDENTITY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """A picture as the model's tower reads it."""

    rows: NDArray[np.uint8]
    """[P, 3 * F * E * E], by channel, then frame, then place in the patch. The four patches of a
    token stand one after the other. Four times as long for normalised float32 values."""
    grid: tuple[int, int, int]
    """Number of patches in time, from top to bottom and from left to right."""
    identity: bytes
    """Equal for equal rows and grids. No hash of the file: other files may hold the same
    picture."""
    num_tokens: int
    num_positions: int
    """Rotary positions that the picture takes."""


def prepare(
    picture: bytes | Image.Image,
    settings: ImageSettings,
    *,
    max_pixels: int | None = None,
    max_decoded: int = decoding.MAX_PIXELS,
) -> PreparedImage:
    """Prepares a file's bytes, or a picture of Pillow's. Raises InvalidPromptError.

    `max_pixels` lowers the checkpoint's limit of the resized picture; `max_decoded` limits the
    pixels of the file.
    """
    upright = decoding.open_picture(picture, max_decoded)
    settings = lowered(settings, max_pixels)
    size = resized(upright.height, upright.width, *settings.limits)
    return from_frames([resize(upright, size)], settings)


def resize(picture: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of an RGB picture, resized to `size`."""
    height, width = size
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))


def from_frames(frames: Sequence[PixelValues], settings: ImageSettings) -> PreparedImage:
    """Makes one picture of the pixels [height, width, 3] of its frames."""
    side, merge = settings.patch_size, settings.merge_size
    height, width, channels = frames[0].shape
    down, across = height // side, width // side
    blocks = np.stack(frames).reshape(
        *(len(frames), down // merge, merge, side, across // merge, merge, side, channels)
    )
    # A token's row and column, a patch in it, its channel, frame and pixels.
    ordered = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    rows = np.ascontiguousarray(ordered).reshape(down * across, -1)
    grid = 1, down, across
    num_tokens = num_tokens_of(grid, merge)
    return PreparedImage(
        rows=rows.view(np.uint8),
        grid=grid,
        identity=_identity(rows, grid, settings),
        num_tokens=num_tokens,
        num_positions=max(down, across) // merge if settings.has_rows else num_tokens,
    )


def normalisation(settings: ImageSettings) -> NDArray[np.float32]:
    """Returns the normalised value of each byte in each channel, [3, 256]: scaled in float64, then
    normalised in float32; or both at once, as processors on torchvision do."""
    values: NDArray[np.float32] = np.arange(256, dtype=np.float32)[:, None]
    if settings.is_tiled:
        return np.ascontiguousarray(normalised(values, settings).T)
    values = (values.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.array(each, np.float32) for each in (settings.mean, settings.std))
    return np.ascontiguousarray(((values - mean) / std).T)


def normalised(values: NDArray[np.float32], settings: ImageSettings) -> NDArray[np.float32]:
    """Returns values of bytes [..., 3], scaled and normalised at once in float32."""
    times = np.float32(1.0 / settings.rescale_factor)
    mean, std = (np.array(each, np.float32) * times for each in (settings.mean, settings.std))
    scaled: NDArray[np.float32] = (values - mean) / std
    return scaled


def _identity(rows: PixelValues, grid: tuple[int, int, int], settings: ImageSettings) -> bytes:
    """Returns the hash of all that the tower's output depends on, besides its weights."""
    numbers = (_VERSION, settings.patch_size, settings.merge_size, *grid, *rows.shape)
    floats = (settings.rescale_factor, *settings.mean, *settings.std)
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    digest.update(struct.pack(f"<{len(numbers)}q{len(floats)}d", *numbers, *floats))
    digest.update(rows.data)
    return digest.digest()


def lowered(settings: ImageSettings, max_pixels: int | None) -> ImageSettings:
    """Returns settings with a lower limit of the resized picture."""
    if max_pixels is None or max_pixels >= settings.max_pixels:
        return settings
    return replace(settings, max_pixels=max_pixels, min_pixels=min(settings.min_pixels, max_pixels))
