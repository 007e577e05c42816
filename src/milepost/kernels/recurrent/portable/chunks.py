"""What kernels that go through a sequence's chunks, with its state in registers, have in common.

Legend: S sequences, N chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_state(pool, slot_stride, slots, i_n, o_state, in_state):
    """A sequence's state in float32; `slots` [S] names it, `o_state` are its numbers' places."""
    source = tl.load(slots + i_n).to(tl.int64) * slot_stride
    return tl.load(pool + source + o_state, in_state, 0).to(tl.float32)


@triton.jit
def store_state(pool, slot_stride, slots, i_n, o_state, in_state, b_state):
    """Once nobody reads the slot that the sequence's state came from: it may be the same."""
    tl.debug_barrier()
    target = tl.load(slots + i_n).to(tl.int64) * slot_stride
    tl.store(pool + target + o_state, b_state.to(pool.dtype.element_ty), in_state)


@triton.jit
def export_state(pool, slot_stride, chunk_slot, i_t, o_state, in_state, b_state):
    """The state behind a chunk, if `chunk_slot` [N] has a slot for it."""
    slot = tl.load(chunk_slot + i_t).to(tl.int64)
    if slot >= 0:
        exported = b_state.to(pool.dtype.element_ty)
        tl.store(pool + slot * slot_stride + o_state, exported, in_state)
