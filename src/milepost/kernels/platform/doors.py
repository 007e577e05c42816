"""Doors to operations that kernels in Triton compute on a GPU, and plain torch everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from milepost.kernels.platform.device import runs_triton

P = ParamSpec("P")
R = TypeVar("R")


def fused(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes an operation of its definition: where the first argument is a tensor that Triton's
    kernels take, the function of that name in `module`, below `milepost.kernels`, runs instead. It
    is imported when it is needed: machines without a GPU may lack Triton."""

    def decorate(definition: Callable[P, R]) -> Callable[P, R]:
        @wraps(definition)
        def operation(*args: Any, **options: Any) -> R:
            run = definition
            if runs_triton(args[0]):
                run = getattr(_import(module), definition.__name__)
            return run(*args, **options)

        return operation

    return decorate


@lru_cache
def _import(module: str) -> ModuleType:
    return import_module(f"milepost.kernels.{module}")
