"""Chips that kernels are compiled for and asked about without having one."""

from __future__ import annotations

from milepost.kernels.platform.device import Chip

_KIB = 1 << 10


def _nvidia(arch: str, num_sms: int, shared_kib: int) -> Chip:
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    return Chip(
        arch=arch,
        capability=(major, minor),
        is_amd=False,
        num_sms=num_sms,
        shared_bytes=shared_kib * _KIB,
    )


def _amd(arch: str, num_sms: int, shared_kib: int) -> Chip:
    return Chip(
        arch=arch, capability=(0, 0), is_amd=True, num_sms=num_sms, shared_bytes=shared_kib * _KIB
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
"""By architecture, each with an example. Shared memory is NVIDIA's "maximum amount of shared memory
per thread block" of the compute capability, AMD's LDS of a workgroup."""
