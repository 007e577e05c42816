"""How boxes are described that TMA copies; nothing runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="descriptors are Triton's")
from milepost.kernels.platform.gluon import boxes_of


@pytest.mark.parametrize(
    ("dtype", "height", "width", "swizzle"),
    [
        (torch.float8_e4m3fn, 128, 128, 128),
        (torch.bfloat16, 8, 64, 128),
        (torch.int16, 128, 32, 64),
        (torch.float32, 1, 16, 0),
    ],
)
def test_lines_are_swizzled_as_tensor_cores_read_them(dtype, height, width, swizzle):
    layout = boxes_of(torch.empty(256, 256, dtype=dtype), height, width).layout
    assert layout.swizzle_byte_width == swizzle
    assert layout.element_bitwidth == 8 * dtype.itemsize


def test_a_stack_is_one_matrix():
    boxes = boxes_of(torch.empty(3, 64, 128, dtype=torch.uint8), 64, 128)
    assert (tuple(boxes.shape), tuple(boxes.strides)) == ((192, 128), (128, 1))
    assert boxes.block_shape == [64, 128]


def test_rows_may_lie_apart():
    boxes = boxes_of(torch.empty(16, 256, dtype=torch.bfloat16)[:, :128], 8, 64)
    assert (tuple(boxes.shape), tuple(boxes.strides)) == ((16, 128), (256, 1))
