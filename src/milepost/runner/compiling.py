"""Compiles the kernels of many steps in parallel, before the first of them runs.

Compiled one after the other as steps meet them, kernels that Triton's cache does not hold yet take
half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from milepost.errors import KernelError
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import ORDINARY
from milepost.progress import progress


@contextmanager
def compiling_only(chip: Chip, *, shows_progress: bool = True) -> Iterator[None]:
    """Has launches of Triton kernels inside the context compile them on other threads and run
    nothing; their outputs are undefined. All are compiled when the context ends, with a progress
    bar if `shows_progress`.

    Raises KernelError at the end if a kernel does not run on the chip.
    """

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        return ORDINARY(kernel, *args, **(options | {"warmup": True}))

    with (
        ThreadPoolExecutor() as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = ORDINARY
        futures = list(mode.raw_futures)
        with progress("compiling kernels", len(futures), is_shown=shows_progress) as note:
            for _ in as_completed(futures):
                note(1)
    complaints = sorted({complaint for future in futures if (complaint := _complain(future, chip))})
    if complaints:
        raise KernelError("; ".join(complaints))


def _complain(future: Future[Any], chip: Chip) -> str:
    """Says why a kernel does not run on the chip; empty if it does."""
    error = future.exception()
    if error is not None:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    kernel = future.result()
    asked = kernel.metadata.shared
    if asked <= chip.shared_bytes:
        return ""
    return f"{kernel.name} asks for {asked} bytes of shared memory, there are {chip.shared_bytes}"
