"""What Gluon calls differently in the versions of Triton that we run with: 3.6 to 3.9."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a program wait for each other; `barrier` from 3.7 on."""

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Have TMA bring a box of a tensor to shared memory; `async_load` from 3.8 on."""

store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Have TMA write a box of a tensor from shared memory; `async_store` from 3.8 on."""
