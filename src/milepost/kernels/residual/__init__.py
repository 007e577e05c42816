"""Attention over depth: a layer reads a mixture of the embedding and of the sums of earlier blocks
of layers (attention residuals, arXiv 2603.15031). `mix` is the definition, in plain torch; on a GPU
`triton` computes it.

Legend: T tokens, S sources, C hidden size, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.platform.tables import fused
from milepost.kernels.platform.tensors import cast

__all__ = ["mix"]


@fused("residual.triton")
def mix(sources: Tensor, delta: Tensor | None, scale: Tensor, query: Tensor, eps: float) -> Tensor:
    """Returns mixtures [T, C] of each token's `sources` [T, S, C], in their dtype. A source weighs
    the softmax over S of `query` [C] times its root mean square norm, scaled by `scale` [C].

    `delta` [T, C], or partials [T, P, C] of it, is added to the last source first, in place.
    """
    if delta is not None:
        last = sources[:, -1]
        last.copy_(last + (delta if delta.dim() == 2 else delta.sum(1)))
    logits = []
    for source in sources.unbind(1):  # one at a time: all of them would be large in float32
        wide = cast(source, scale.dtype)
        rate = wide.square().mean(-1).add(eps).rsqrt()
        logits.append((wide * (scale * query)).sum(-1) * rate)
    shares = torch.stack(logits, 1).softmax(1)
    mixed = torch.zeros_like(sources[:, 0], dtype=scale.dtype)
    for source, share in zip(sources.unbind(1), shares.unbind(1), strict=True):
        mixed.addcmul_(cast(source, scale.dtype), share[:, None])
    return cast(mixed, sources.dtype)
