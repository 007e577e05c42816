"""Resizes pictures bilinearly with the bits of torch's uint8 interpolation with antialiasing, which
processors on torchvision use. Pillow's differs from it by a level or two where it makes pictures
smaller: torch rounds the weights to 16 bits (Pillow-SIMD's way; aten's UpSampleKernelAVXAntialias).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MOST_BITS = 22


def resize_bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, channels], resized to `size`: columns first, then rows,
    and rounded after each."""
    height, width = size
    turned = _resize_rows(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return np.ascontiguousarray(_resize_rows(turned, height))


def _resize_rows(pixels: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Returns `count` rows for those of `pixels` [rows, ...]."""
    if count == len(pixels):
        return pixels
    first, weights, bits = _weights(len(pixels), count)
    total = np.full((count, *pixels.shape[1:]), 1 << (bits - 1), np.int32)
    for number, column in enumerate(weights.T):
        place = np.minimum(first + number, len(pixels) - 1)  # the weight of what is not there is 0
        total += column[:, None, None] * pixels[place]
    return (total >> bits).clip(0, 255).astype(np.uint8)


def _weights(rows: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Returns the first row that each of `count` rows is made of, the weights of the rows from
    there on [count, taps] as whole numbers, and how many of their bits are below one."""
    scale = rows / count
    reach = max(scale, 1.0)
    centres = scale * (np.arange(count) + 0.5)
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + reach + 0.5).astype(np.int64), rows)
    places = first[:, None] + np.arange(2 * math.ceil(reach) + 1)
    distances = np.abs((places - centres[:, None] + 0.5) * (1.0 / reach))
    exact = np.where(places < end[:, None], np.maximum(1.0 - distances, 0.0), 0.0)
    exact /= exact.sum(1, keepdims=True)
    most, bits = float(exact.max()), 0
    while bits < _MOST_BITS and int(0.5 + most * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return first, (exact * (1 << bits) + 0.5).astype(np.int32), bits
