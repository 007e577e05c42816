"""Attention over depth: what a layer reads is a mixture of the embedding and of what earlier blocks
of layers have added up (attention residuals, arXiv 2603.15031).

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition; on a GPU `triton` computes it.
"""

from __future__ import annotations

from milepost.kernels.platform.tables import fused
from milepost.kernels.residual import reference

__all__ = ["mix"]

mix = fused("residual.triton")(reference.mix)
