"""Hyper-connections: there are several residual streams; a part of a layer reads a mixture of them
and adds its output to each, times a share (Hyper-Connections, arXiv 2409.19606; as in
Qwen3.8-Flash-Next). This is the definition, in plain torch; on a GPU `triton` computes each
function in one launch.

Legend: T tokens, S streams, C hidden size, P split-K partials.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tables import fused
from milepost.kernels.platform.tensors import cast

__all__ = ["inject", "mix", "norm"]


@fused("hyper.triton")
def norm(streams: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Norms each stream of `streams` [T, S, C] and multiplies it by its row of `scale` [S, C]."""
    wide = cast(streams, scale.dtype)
    return cast(F.rms_norm(wide, wide.shape[-1:], eps=eps).mul_(scale), streams.dtype)


@fused("hyper.triton")
def mix(normed: Tensor, logits: Tensor) -> Tensor:
    """Returns the mean [T, C] of `normed` [T, S, C] times the sigmoids of `logits` [T, S * C]."""
    return (logits.view_as(normed).sigmoid() * normed).mean(1)


@fused("hyper.triton")
def inject(streams: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """Adds a part's `output` [T, C], or the sum of its partials [T, P, C], to each of `streams`
    [T, S, C], times twice the sigmoid of its logit [T, S]."""
    output = output if output.dim() == 2 else output.sum(1)
    shares = 2 * logits.sigmoid()
    return streams + cast(output, streams.dtype)[:, None] * shares[:, :, None]
