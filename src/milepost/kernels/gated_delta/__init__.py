"""The gated delta rule over pools of states: `prefill` for many tokens a sequence, `decode` for
one.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition.
"""

from milepost.kernels.gated_delta.chunks import CHUNK, ChunkLayout, lay_out_chunks
from milepost.kernels.gated_delta.reference import decode, prefill

__all__ = ["CHUNK", "ChunkLayout", "decode", "lay_out_chunks", "prefill"]
