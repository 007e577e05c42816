"""Triton: launches that overlap, so that short kernels do not wait for each other's start.

With `OVERLAPPED` (programmatic dependent launch) a kernel starts as soon as every program of the
kernel before it has called `launch_dependents` or ended, so its instructions, addresses and weights
are ready when that one ends. Such a kernel must call `wait_for_inputs` before it reads what a
kernel wrote and before it writes: then everything launched before it is complete. Parameters may be
read earlier. Any kernel may call `launch_dependents`, and kernels without any of this mix freely
with the others.

The last kernel before a GEMM does better not to call it: a GEMM that starts while a long kernel
runs has its programs placed on the few SMs that are free by then.

On a GPU without this feature (before Hopper) and in Triton's interpreter nothing overlaps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from milepost.kernels.platform.device import probe

_CAN_OVERLAP = (
    not triton.knobs.runtime.interpret
    and torch.cuda.is_available()
    and probe(torch.device("cuda")).can_overlap
)
_OVERLAPS = tl.constexpr(_CAN_OVERLAP)

OVERLAPPED: dict[str, bool] = {"launch_pdl": True} if _CAN_OVERLAP else {}
"""Options of a kernel's launch."""


@triton.jit
def launch_dependents():
    if _OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    if _OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_as_padding():
    """For programs with nothing to do: one of a launch waits, lest a launch of nothing else end
    before the one before it. The others make room at once."""
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        wait_for_inputs()
