"""A plan of memory: what launches that do nothing leave behind."""

import pytest
import torch

from milepost.kernels.platform.pretending import Meter, launching_nothing

jit = pytest.importorskip("triton.runtime.jit")


def test_a_launch_that_does_nothing_keeps_no_argument():
    with Meter() as meter, launching_nothing():
        tensor = torch.empty(1024, dtype=torch.uint8, device="meta")
        jit.JITFunction.run(None, tensor, grid=(1,), warmup=False)
        assert meter.num_bytes == 1024
        del tensor
        assert meter.num_bytes == 0
