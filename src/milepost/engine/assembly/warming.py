"""Compiles a model's kernels ahead of a start, without weights and without a GPU.

Several processes lay out the same steps, and each compiles its share of the kernels: much of a
compiler's work holds Python's lock, so threads of one process do not suffice. The results are in
Triton's cache on disk, where a start with the same configuration on such a chip finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch

from milepost.config import EngineConfig
from milepost.engine.assembly.fitting import fit_steps
from milepost.engine.assembly.planning import GPU, outline_of
from milepost.errors import EngineDeadError, KernelError
from milepost.kernels.platform.device import Chip, hopper_kernels
from milepost.kernels.platform.pretending import pretend
from milepost.runner.measuring import compile_steps, rehearsal

MAX_PROCESSES = 16
"""More would trace the same steps for ever fewer kernels."""


class WarmShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one process."""

    config: EngineConfig
    chip: Chip
    gpu_bytes: int
    index: int
    num_shares: int


def warm(config: EngineConfig, chip: Chip, gpu_bytes: int, num_processes: int | None = None) -> int:
    """Compiles all kernels of a configuration, with a progress bar; returns the number of processes
    that did. Raises KernelError if one does not compile, and EngineDeadError for other failures."""
    num = num_processes or min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    processes = []
    for index in range(num):
        share = WarmShare(
            config=config, chip=chip, gpu_bytes=gpu_bytes, index=index, num_shares=num
        )
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if index == 0 else subprocess.DEVNULL,  # the shares are alike
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(share))
        process.stdin.close()
        processes.append(process)
    complaints = {_complaint(process) for process in processes} - {""}
    if complaints:
        raise KernelError("; ".join(sorted(complaints)))
    return num


def _complaint(process: subprocess.Popen[bytes]) -> str:
    """Waits for a process, and returns what does not compile."""
    assert process.stdout is not None
    said = process.stdout.read().decode()
    code = process.wait()
    if code:
        raise EngineDeadError(f"a process that compiles kernels has ended: exit code {code}")
    return said.strip()


def compile_share(share: WarmShare) -> None:
    """Compiles one share of the kernels in this process. Raises KernelError."""
    config = share.config
    with hopper_kernels(config.hopper_kernels), pretend(share.chip), _only(share):
        part = outline_of(config)
        fitted = fit_steps(config, part, GPU, share.gpu_bytes)
        with torch.inference_mode():
            compile_steps(rehearsal(part.model, fitted.shape, fitted.steps), fitted.steps)
            part.measure_tower(config)


@contextmanager
def _only(share: WarmShare) -> Iterator[None]:
    """Compiles only every `num_shares`-th kernel inside the context. All processes meet kernels in
    the same order."""
    # Imported here because triton need not be installed on machines without a GPU.
    from triton.runtime.jit import JITFunction

    do_compile = JITFunction._do_compile
    seen: dict[tuple[object, object], int] = {}

    def compile_own(kernel: Any, key: object, *arguments: Any) -> Any:
        place = seen.setdefault((kernel.fn, key), len(seen))
        if place % share.num_shares == share.index:
            return do_compile(kernel, key, *arguments)
        return None

    with mock.patch.object(JITFunction, "_do_compile", compile_own):
        yield


def main() -> None:
    """Runs one share, which comes over standard input; complaints go to standard output."""
    share = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WarmShare)
    try:
        compile_share(share)
    except KernelError as error:
        print(error)
