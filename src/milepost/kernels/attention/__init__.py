"""Paged, causal, grouped-query attention: `store` writes KV to pages, `decode` and `prefill` read
it from there.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition.
"""

from milepost.kernels.attention import fused
from milepost.kernels.attention.pages import (
    DecodePages,
    PrefillPages,
    lay_out_decodes,
    lay_out_prefills,
)
from milepost.kernels.attention.reference import decode, prefill, store

__all__ = [
    "DecodePages",
    "PrefillPages",
    "decode",
    "fused",
    "lay_out_decodes",
    "lay_out_prefills",
    "prefill",
    "store",
]
