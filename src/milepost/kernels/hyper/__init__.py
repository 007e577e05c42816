"""Hyper-connections: the residual stream is several streams, which a part reads as a mixture and
writes to with a share each (Hyper-Connections, arXiv 2409.19606; as Qwen3.8-Flash-Next has them).

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition, on any device.
"""

from __future__ import annotations

from milepost.kernels.hyper.reference import inject, mix, norm

__all__ = ["inject", "mix", "norm"]
