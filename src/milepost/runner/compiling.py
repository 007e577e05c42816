"""Compiles the kernels of many steps side by side, before the first of them runs.

Met one after the other, kernels that Triton's cache does not hold yet take half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton
from tqdm import tqdm
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, launches of Triton's kernels have them compiled, on other threads, and run nothing:
    what they would have written holds anything. All are compiled at the end; shows progress.
    """
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        return launch(kernel, *args, **(options | {"warmup": True}))

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool) as mode:
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
        compiled = as_completed(mode.raw_futures)
        num_kernels = len(mode.raw_futures)
        for _ in tqdm(compiled, desc="compiling kernels", total=num_kernels, dynamic_ncols=True):
            pass
