"""Resizes pictures with antialiasing as torch does, for processors on torchvision: bilinearly from
bytes to bytes with the same bits, and bicubically from bytes to float32.

Pillow's bytes differ from torch's by a level or two where pictures are made smaller: torch rounds
the weights to 16 bits (Pillow-SIMD's way; aten's UpSampleKernelAVXAntialias). Torch's floats differ
in their last bits from one CPU to another; those made here do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_MOST_BITS = 22
_CUBIC = -0.5
"""The parameter of Keys's kernel (DOI 10.1109/TASSP.1981.1163711) for antialiasing."""

PixelValues = NDArray[np.uint8] | NDArray[np.float32]


def resize_bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, channels], resized to `size`: columns first, then rows,
    and rounded after each."""
    height, width = size
    turned = _bytes_of_rows(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return np.ascontiguousarray(_bytes_of_rows(turned, height))


def resize_bicubic(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float32]:
    """Returns the pixels [height, width, channels], resized to `size`, columns first. Values may
    lie a little outside of a byte's, since the kernel overshoots."""
    height, width = size
    turned = _floats_of_rows(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return np.ascontiguousarray(_floats_of_rows(turned, height), np.float32)


def _bytes_of_rows(pixels: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Returns `count` rows for those of `pixels` [rows, ...]."""
    if count == len(pixels):
        return pixels
    first, exact = _weights(len(pixels), count, 1.0, lambda at: 1.0 - at)
    most, bits = float(exact.max()), 0
    while bits < _MOST_BITS and int(0.5 + most * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    weights = (exact * (1 << bits) + 0.5).astype(np.int32)
    total = np.full((count, *pixels.shape[1:]), 1 << (bits - 1), np.int32)
    for number, column in enumerate(weights.T):
        place = np.minimum(first + number, len(pixels) - 1)  # rows past the end have weight 0
        total += column[:, None, None] * pixels[place]
    return (total >> bits).clip(0, 255).astype(np.uint8)


def _floats_of_rows(pixels: PixelValues, count: int) -> PixelValues:
    """Returns `count` rows for those of `pixels` [rows, ...]."""
    if count == len(pixels):
        return pixels
    first, exact = _weights(len(pixels), count, 2.0, _cubic)
    total = np.zeros((count, *pixels.shape[1:]), np.float32)
    for number, column in enumerate(exact.astype(np.float32).T):
        place = np.minimum(first + number, len(pixels) - 1)  # rows past the end have weight 0
        total += column[:, None, None] * pixels[place]
    return total


def _cubic(at: NDArray[np.float64]) -> NDArray[np.float64]:
    near = ((_CUBIC + 2) * at - (_CUBIC + 3)) * at**2 + 1
    far = _CUBIC * (((at - 5) * at + 8) * at - 4)
    return np.where(at < 1, near, far)


def _weights(
    rows: int,
    count: int,
    support: float,
    kernel: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the first row that each of `count` rows is made of, and the weights of the rows from
    there on [count, taps]. `kernel` is that of distances up to `support`."""
    scale = rows / count
    widening = max(scale, 1.0)
    reach = support * widening
    centres = scale * (np.arange(count) + 0.5)
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + reach + 0.5).astype(np.int64), rows)
    places = first[:, None] + np.arange(2 * math.ceil(reach) + 1)
    distances = np.abs((places - centres[:, None] + 0.5) * (1.0 / widening))
    is_near = (places < end[:, None]) & (distances < support)
    exact = np.where(is_near, kernel(distances), 0.0)
    return first, exact / exact.sum(1, keepdims=True)
