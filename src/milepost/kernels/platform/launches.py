"""Triton: launches that are like an earlier one, in a fraction of the time on the host.

For each launch Triton describes every argument, spells the description and its options out, reads
its settings from the environment and asks the driver about every pointer, which takes longer than
many a kernel runs. A kernel marked with `quick` remembers what it was compiled to for arguments
that Triton tells no further apart, and hands those over. What is new, watched, or of a kind not
known here goes Triton's own way. Triton's settings hold as they were at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor

from milepost.kernels.platform.device import triton_version

_TRITONS = ((3, 6), (3, 9))
"""First and last version whose way to specialise and to launch was read."""
_ORDINARY = JITFunction.run
_INT32, _INT64 = 1 << 31, 1 << 63

Kernel = TypeVar("Kernel")
Kind = tuple[object, ...]


def _descriptors() -> tuple[type, ...]:
    try:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError:
        return (tensor_descriptor.TensorDescriptor,)
    return tensor_descriptor.TensorDescriptor, TensorDescriptor


_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (float, bool, type(None))
"""Types of arguments whose values are not specialised by."""
_DESCRIPTORS = _descriptors()
_OWN_OF_DESCRIPTORS = ("base", "shape", "strides")
"""Fields that one compiled kernel takes any of."""


def quick(kernel: Kernel) -> Kernel:
    """Marks a kernel: its launches are remembered, on NVIDIA's chips."""
    first, last = _TRITONS
    if (
        isinstance(kernel, JITFunction)
        and first <= triton_version() <= last
        and torch.version.hip is None
        and _ends_in_constants(kernel)
    ):
        kernel.run = _remembering(kernel)
    return kernel


def _ends_in_constants(kernel: JITFunction[Any]) -> bool:
    are_constant = [param.is_constexpr for param in kernel.params]
    return are_constant == sorted(are_constant)


def describe(args: tuple[Any, ...]) -> tuple[Kind, list[Any]] | None:
    """All that Triton specialises a kernel's arguments by, and what to launch it with instead of
    them; None for what a launch cannot be remembered by.

    Tensors become addresses: of those on a GPU the driver need not be asked."""
    kind: list[object] = []
    values: list[Any] = []
    for value in args:
        own = type(value)
        if own in _TENSORS:
            if not value.is_cuda:
                return None
            address = value.data_ptr()
            kind.append(value.dtype)
            kind.append(address % 16 == 0)
            values.append(address)
            continue
        if own is int:
            kind.append(_kind_of_int(value))
        elif own in _PLAIN:
            kind.append(own)
        elif own in _DESCRIPTORS:
            if not value.base.is_cuda:
                return None
            kind += own, *_kind_of_descriptor(value)
        else:
            return None
        values.append(value)
    return tuple(kind), values


def _kind_of_int(value: int) -> str:
    if value == 1:
        return "1"
    if -_INT32 <= value < _INT32:
        return "16" if value % 16 == 0 else "i"
    width = "l" if -_INT64 <= value < _INT64 else "u"
    return width + "16" if value % 16 == 0 else width


def _kind_of_descriptor(descriptor: Any) -> Kind:
    """A box of numbers of a type; in Gluon it has a layout."""
    fields = vars(descriptor)
    rest = [
        tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in _OWN_OF_DESCRIPTORS
    ]
    return (descriptor.base.dtype, *rest)


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    run: Callable[..., None]
    function: int
    metadata: tuple[Any, ...]
    constants: tuple[Any, ...]
    """Of the parameters behind the arguments; the launch itself ignores them."""


def _remembering(kernel: JITFunction[Any]) -> Callable[..., Any]:
    """What stands in for the kernel's `run`."""
    known: dict[Kind, _Compiled] = {}
    num_arguments = sum(not param.is_constexpr for param in kernel.params)
    runtime, hooks = triton.knobs.runtime, kernel.pre_run_hooks

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        ordinary: Callable[..., Any] = JITFunction.run
        described = None
        # Whoever replaced the launch, or watches it, wants to see all of them.
        is_watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or hooks
        if not (warmup or is_watched or ordinary is not _ORDINARY or callable(grid)):
            described = describe(args) if len(args) == num_arguments else None
        if described is None:
            return ordinary(kernel, *args, grid=grid, warmup=warmup, **options)
        device, given = torch.cuda.current_device(), options.values()
        # Types, too, for True is 1.
        kind = (device, described[0], *options, *given, *map(type, given))
        found = known.get(kind)
        if found is None:
            compiled = ordinary(kernel, *args, grid=grid, warmup=False, **options)
            if getattr(compiled, "function", None) is not None:  # or nothing was launched
                known[kind] = _note(kernel, compiled, options)
            return compiled
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        watchers = None, None, None
        start = x, y, z, _current_stream(device), found.function, found.metadata
        found.run(*start, *watchers, *described[1], *found.constants)
        return None

    return run


def _note(kernel: JITFunction[Any], compiled: Any, options: dict[str, Any]) -> _Compiled:
    parameters = kernel.signature.parameters
    constants = tuple(
        options.get(param.name, parameters[param.name].default)
        for param in kernel.params
        if param.is_constexpr
    )
    return _Compiled(
        run=compiled.run,
        function=compiled.function,
        metadata=compiled.packed_metadata,
        constants=constants,
    )
