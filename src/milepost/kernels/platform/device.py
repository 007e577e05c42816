"""Capabilities of a device, and the kernels that run on it.

This module can be imported without triton, which the fused kernels need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from milepost.errors import ConfigError, how_to_install

_GLUON_TRITONS = ((3, 6), (3, 9))
"""First and last Triton whose Gluon compiles our kernels in tests; Gluon may change with every
release."""
_OLDEST = (8, 0)
"""Least compute capability with arithmetic in bfloat16."""
_FLOAT8 = (8, 9)
"""Least compute capability with float8."""
_UNLIMITED = 1 << 30
_AMD_SHARED_BYTES = 64 << 10
"""Shared memory of AMD's chips if torch does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Properties of a GPU that decide how kernels are cut up."""

    arch: str
    """As compilers call it: sm_90, gfx942; cpu for Triton's interpreter."""
    capability: tuple[int, int]
    """NVIDIA's compute capability; (0, 0) for AMD."""
    is_amd: bool
    num_sms: int
    """SMs, or AMD's compute units."""
    shared_bytes: int
    """Shared memory that a program may ask for."""

    @property
    def can_overlap(self) -> bool:
        """Whether a kernel's launch can overlap with the one before (see `launches`)."""
        return self.capability >= (9, 0)

    @property
    def has_tma(self) -> bool:
        """Whether TMA copies boxes of a tensor to shared memory; elsewhere Triton needs so much
        code for a descriptor's loads that plain addresses are better."""
        return self.capability >= (9, 0)

    @property
    def has_wide_mma(self) -> bool:
        """Whether matrix units read an operand from shared memory, or sums are not in registers:
        wgmma or tcgen05."""
        return self.capability[0] in (9, 10)

    @property
    def has_fp8(self) -> bool:
        """Whether the chip knows float8 as OCP defines it; Triton's interpreter rounds another
        way."""
        return self.capability >= _FLOAT8 and self.arch != "cpu"

    @property
    def has_fp4(self) -> bool:
        """Whether Triton has the chip's products of four-bit floats, e2m1, with scales of groups.
        Those of sm_121 came with 3.8."""
        major, minor = self.capability
        return major == 10 or (major == 12 and (minor == 0 or triton_version() >= (3, 8)))

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether products with FP8 weights round their rows to FP8. A chip that cannot multiply
        FP8 decodes the weights alone: this costs less, and is closer to unrounded rows."""
        return self.has_fp8 or self.arch == "cpu"

    @property
    def unpacks_fp8(self) -> bool:
        """Whether kernels unpack FP8 in registers, as on NVIDIA chips without float8."""
        return not self.has_fp8 and not self.is_amd

    def choose_stages(self, wanted: int, step_bytes: int) -> int:
        """Returns the number of a loop's steps that may be under way, each with `step_bytes` of
        shared memory: one of them is in registers. AMD's loads go through registers, which hold at
        most two.
        """
        most = 2 if self.is_amd else wanted
        return max(2, min(wanted, most, 1 + self.shared_bytes // step_bytes))


_INTERPRETER = Chip(arch="cpu", capability=(9, 0), is_amd=False, num_sms=1, shared_bytes=_UNLIMITED)
"""Triton's interpreter, which takes the code paths of the largest chip."""


@lru_cache
def probe(device: torch.device) -> Chip:
    """Returns the chip of a device."""
    if device.type == "cpu":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    major, minor = torch.cuda.get_device_capability(device)
    return Chip(
        arch=properties.gcnArchName.split(":")[0] if is_amd else f"sm_{major}{minor}",
        capability=(0, 0) if is_amd else (major, minor),
        is_amd=is_amd,
        num_sms=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", _AMD_SHARED_BYTES),
    )


_ALLOWS_HOPPER: ContextVar[bool] = ContextVar("allows_hopper", default=True)


@contextmanager
def hopper_kernels(allowed: bool) -> Iterator[None]:
    """Allows or forbids Hopper's own kernels inside; the portable ones replace them. Holds for the
    current thread, so two engines may differ."""
    token = _ALLOWS_HOPPER.set(allowed)
    try:
        yield
    finally:
        _ALLOWS_HOPPER.reset(token)


def allows_hopper_kernels() -> bool:
    """Whether Hopper's own kernels are allowed by the innermost `hopper_kernels`."""
    return _ALLOWS_HOPPER.get()


def as_made(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method to run under `hopper_kernels(self.allows_hopper)`, whichever thread calls
    it."""

    @wraps(method)
    def run(own: Any, *given: Any, **how: Any) -> Any:
        with hopper_kernels(own.allows_hopper):
            return method(own, *given, **how)

    return run


def runs_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels compute operations without a layout on the tensor's device."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and triton_version() != (0, 0)


def why_no_gluon(chip: Chip) -> str:
    """Why Hopper's own kernels do not run on the chip; empty if they do. Asked before one of them
    is imported."""
    if chip.arch == "cpu":
        return "no interpreter runs Gluon"
    if chip.capability != (9, 0):
        return "they need sm_90"
    if not _ALLOWS_HOPPER.get():
        return "hopper_kernels is off"
    oldest, newest = _GLUON_TRITONS
    if not oldest <= triton_version() <= newest:
        return "they are tested with Triton {}.{} to {}.{}".format(*oldest, *newest)
    return ""


@lru_cache
def triton_version() -> tuple[int, int]:
    """Returns Triton's major and minor version; (0, 0) if it is not installed."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


class Capable(Protocol):
    """An operation that knows what its kernels can do."""

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Why no fused kernel does it on the chip; empty if one does, as on every chip that Triton
        supports."""
        return ""


def why_reference(
    device: torch.device, dtype: torch.dtype, operations: Iterable[Capable] = ()
) -> str:
    """Why a model of these operations runs with the reference kernels on the device; empty if the
    fused ones run."""
    if device.type != "cuda":
        return f"the fused ones need a GPU, this is {device.type}"
    if triton_version() == (0, 0):
        return f"the fused ones need triton: {how_to_install('gpu')}"
    if dtype == torch.float64:
        return "the fused ones do not add up in float64"
    chip = probe(device)
    if not chip.is_amd and chip.capability < _OLDEST:
        return f"the fused ones need sm_80, this is {chip.arch}"
    return next(filter(None, (operation.why_reference(chip) for operation in operations)), "")


def describe(device: torch.device, dtype: torch.dtype, operations: Iterable[Capable] = ()) -> str:
    """Says in a line for the log which kernels run and why others do not."""
    reason = why_reference(device, dtype, operations)
    if reason:
        return f"reference; {reason}"
    chip = probe(device)
    limits = f"{chip.num_sms} SMs, {chip.shared_bytes >> 10} KiB shared memory"
    reason = why_no_gluon(chip)
    hopper = f"not those for Hopper ({reason})" if reason else "those for Hopper"
    overlap = "overlapping launches" if chip.can_overlap else "no overlapping launches (sm_90)"
    triton = "{}.{}".format(*triton_version())
    return f"fused for {chip.arch} ({limits}), Triton {triton}; {hopper}; {overlap}"


def num_sms(device: torch.device) -> int:
    """Returns the number of SMs of a GPU; 1 for Triton's interpreter."""
    return probe(device).num_sms


# --- chips that are asked about without having one ------------------------------------------------


def _nvidia(arch: str, num_sms: int, shared_kib: int) -> Chip:
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    return Chip(
        arch=arch,
        capability=(major, minor),
        is_amd=False,
        num_sms=num_sms,
        shared_bytes=shared_kib << 10,
    )


def _amd(arch: str, num_sms: int, shared_kib: int) -> Chip:
    return Chip(
        arch=arch, capability=(0, 0), is_amd=True, num_sms=num_sms, shared_bytes=shared_kib << 10
    )


CHIPS: dict[str, tuple[str, Chip]] = {
    chip.arch: (example, chip)
    for example, chip in (
        ("A100", _nvidia("sm_80", 108, 163)),
        ("A10", _nvidia("sm_86", 72, 99)),
        ("L4", _nvidia("sm_89", 58, 99)),
        ("H200", _nvidia("sm_90", 132, 227)),
        ("B200", _nvidia("sm_100", 148, 227)),
        ("RTX 5090", _nvidia("sm_120", 170, 99)),
        ("MI300X", _amd("gfx942", 304, 64)),
        ("MI350X", _amd("gfx950", 256, 160)),
    )
}
"""An example and its properties by architecture. Shared memory is NVIDIA's "maximum amount of
shared memory per thread block" of the compute capability, and AMD's LDS per workgroup."""


def find_chip(name: str) -> Chip:
    """Returns a chip of the table. Raises ConfigError for a name that is not there."""
    if name not in CHIPS:
        raise ConfigError(f"--chip {name}: this is none of {', '.join(CHIPS)}")
    return CHIPS[name][1]


def require_fp4(chip: Chip) -> None:
    """Raises ConfigError for a chip without products of four-bit floats."""
    if not chip.has_fp4:
        raise ConfigError(
            "fp4_activations: Triton {}.{} has no products of four-bit floats for {}; leave it "
            "out".format(*triton_version(), chip.arch)
        )


def present_memory() -> int:
    """Returns the bytes of this machine's GPU; without one those of the usual large one."""
    if not torch.cuda.is_available():
        return 80 * 10**9
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def present_chip() -> Chip:
    """Returns this machine's chip. Raises ConfigError if it has none."""
    if not torch.cuda.is_available():
        raise ConfigError(f"there is no GPU here: name one, as --chip {next(iter(CHIPS))}")
    return probe(torch.device("cuda", torch.cuda.current_device()))
