"""Hyper-connections: the residual stream is several streams, which a part reads as a mixture and
writes to with a share each (Hyper-Connections, arXiv 2409.19606; as Qwen3.8-Flash-Next has them).
This is the definition, in plain torch.

Legend: T tokens, S streams, C hidden size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tensors import cast

__all__ = ["inject", "mix", "norm"]


def norm(streams: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Norms each stream of `streams` [T, S, C] and multiplies it by its row of `scale` [S, C]."""
    wide = cast(streams, scale.dtype)
    return cast(F.rms_norm(wide, wide.shape[-1:], eps=eps).mul_(scale), streams.dtype)


def mix(normed: Tensor, logits: Tensor) -> Tensor:
    """Returns the mean [T, C] of `normed` [T, S, C] times the sigmoids of `logits` [T, S * C]."""
    return (logits.view_as(normed).sigmoid() * normed).mean(1)


def inject(streams: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """Adds a part's `output` [T, C] to each stream, times twice the sigmoid of its logit [T, S]."""
    shares = 2 * logits.sigmoid()
    return streams + cast(output, streams.dtype)[:, None] * shares[:, :, None]
