"""Triton launches: cheap to repeat (`quick`), and overlapping (programmatic dependent launch).

For each launch Triton describes every argument, spells out the description and its options, reads
its settings from the environment and asks the driver about every pointer: more time than many a
kernel runs. A kernel marked `quick` remembers what it was compiled to for arguments that Triton
does not tell apart, and launches that. New, watched or unknown kinds of launches go through Triton.
Triton's settings hold as they were at the first launch.

With `OVERLAPPED` a kernel starts as soon as every program of the kernel before it has called
`launch_dependents` or ended, so its instructions, addresses and weights are ready when that one
ends. Such a kernel must call `wait_for_inputs` before it reads what a kernel wrote and before it
writes: then everything launched before it is complete. Parameters may be read earlier. Any kernel
may call `launch_dependents`, and kernels without any of this mix freely with the others.

The last kernel before a GEMM does better not to call it: a GEMM that starts while a long kernel
runs has its programs placed on the few SMs that are free by then.

On a GPU without this feature (before Hopper) and in Triton's interpreter nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor

from milepost.kernels.platform.device import probe, triton_version

_CAN_OVERLAP = (
    not triton.knobs.runtime.interpret
    and torch.cuda.is_available()
    and probe(torch.device("cuda")).can_overlap
)
_OVERLAPS = tl.constexpr(_CAN_OVERLAP)

OVERLAPPED: dict[str, bool] = {"launch_pdl": True} if _CAN_OVERLAP else {}
"""Launch options of a kernel that starts early."""


@triton.jit
def launch_dependents():
    """Lets the next kernel start: see the module."""
    if _OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    """Waits until all earlier launches are complete: see the module."""
    if _OVERLAPS:
        tl.extra.cuda.gdc_wait()


# --- launches that are remembered -----------------------------------------------------------------

_TRITONS = ((3, 6), (3, 9))
"""First and last Triton whose specialisation and launch code this module follows."""
_TAKES_TUPLES = triton_version() == (3, 6)
"""Whether a compiled kernel takes an argument's fields as a tuple of numbers."""
ORDINARY = JITFunction.run
"""Triton's own launch, as it was before anything replaced it."""
_INT32, _INT64 = 1 << 31, 1 << 63

Kernel = TypeVar("Kernel")
LaunchKind = tuple[object, ...]


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


def describe(args: tuple[Any, ...]) -> tuple[LaunchKind, list[Any]] | None:
    """Returns everything that Triton specialises a kernel's arguments by, and the values to launch
    it with. Returns None if the launch cannot be remembered.

    Tensors become addresses: the driver need not be asked about those on a GPU.
    """
    kind: list[object] = []
    values: list[Any] = []
    for value in args:
        own = type(value)
        if own in _TENSORS:
            if not value.is_cuda:
                return None
            address = value.data_ptr()
            kind += value.dtype, not address % 16
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
        elif _TAKES_TUPLES and issubclass(own, tuple):
            described = describe(value)
            if described is None:
                return None
            kind += own, described[0]
            value = tuple(described[1])
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


def _kind_of_descriptor(descriptor: Any) -> LaunchKind:
    """Returns what distinguishes descriptors: the dtype, the box and, in Gluon, the layout."""
    fields = vars(descriptor)
    rest = [
        tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in _OWN_OF_DESCRIPTORS
    ]
    return (descriptor.base.dtype, *rest)


def _types_of(constants: Iterable[Any]) -> LaunchKind:
    """Returns the types of constants, and of the members of tuples."""
    constants = tuple(constants)
    types = tuple(map(type, constants))
    places = _tuples_in(types)
    return (types, *[_types_of(constants[place]) for place in places]) if places else types


@cache
def _tuples_in(types: tuple[type, ...]) -> tuple[int, ...]:
    """Returns the places of types that are tuples."""
    return tuple(place for place, own in enumerate(types) if issubclass(own, tuple))


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    run: Callable[..., None]
    function: int
    metadata: tuple[Any, ...]
    constants: tuple[Any, ...]
    """Constants, passed after the arguments; the launch itself ignores them."""


def _remembering(kernel: JITFunction[Any]) -> Callable[..., Any]:
    """Returns the replacement of the kernel's `run`."""
    known: dict[LaunchKind, _Compiled] = {}
    num_arguments = sum(not param.is_constexpr for param in kernel.params)
    runtime, hooks = triton.knobs.runtime, kernel.pre_run_hooks

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        ordinary: Callable[..., Any] = JITFunction.run
        described = None
        # If `JITFunction.run` is replaced or hooked, every launch must go through it.
        is_watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or hooks
        if not (warmup or is_watched or ordinary is not ORDINARY or callable(grid)):
            described = describe(args) if len(args) == num_arguments else None
        if described is None:
            return ordinary(kernel, *args, grid=grid, warmup=warmup, **options)
        device, given = torch.cuda.current_device(), options.values()
        # Types are part of the key, since True == 1.
        kind = (device, described[0], *options, *given, _types_of(given))
        found = known.get(kind)
        if found is None:
            compiled = ordinary(kernel, *args, grid=grid, warmup=False, **options)
            if getattr(compiled, "function", None) is not None:  # else nothing was launched
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
