"""Causal depthwise short convolution over pools of states: `prefill` and `decode`.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition.
"""

from milepost.kernels.conv.reference import ConvLayout, decode, lay_out_windows, prefill

__all__ = ["ConvLayout", "decode", "lay_out_windows", "prefill"]
