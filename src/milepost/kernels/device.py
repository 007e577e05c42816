"""What kernels ask of the device that they run on."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def runs_gluon(tensor: Tensor) -> bool:
    """Whether kernels in Gluon for Hopper run where the tensor is. Asked before such a kernel is
    imported: Gluon may change with every Triton."""
    if not (tensor.is_cuda and triton.__version__.startswith("3.6.")):
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for Triton's interpreter."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
