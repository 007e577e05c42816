"""The residual stream where it is more than one sum: attention over depth, and hyper-connections.
These are the definitions, in plain torch; on a GPU `triton` computes each in one launch.

Attention over depth (`mix`): a layer reads a mixture of the embedding and of the sums of earlier
blocks of layers (attention residuals, arXiv 2603.15031). Hyper-connections: there are several
residual streams; a part of a layer reads a mixture of them and adds its output to each, times a
share (arXiv 2409.19606; as in Qwen3.8-Flash-Next).

Legend: T tokens, S sources or streams, C hidden size, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.platform.tables import fused
from milepost.kernels.platform.tensors import cast

__all__ = ["inject", "mix", "mix_streams", "norm_streams"]


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


@fused("residual.triton")
def norm_streams(streams: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Norms each stream of `streams` [T, S, C] and multiplies it by its row of `scale` [S, C]."""
    return norm.norm(streams, scale, eps)


@fused("residual.triton")
def mix_streams(normed: Tensor, logits: Tensor) -> Tensor:
    """Returns the mean [T, C] of `normed` [T, S, C] times the sigmoids of `logits` [T, S * C]."""
    return (logits.view_as(normed).sigmoid() * normed).mean(1)


@fused("residual.triton")
def inject(streams: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """Adds a part's `output` [T, C], or the sum of its partials [T, P, C], to each of `streams`
    [T, S, C], times twice the sigmoid of its logit [T, S]."""
    output = output if output.dim() == 2 else output.sum(1)
    shares = 2 * logits.sigmoid()
    return streams + cast(output, streams.dtype)[:, None] * shares[:, :, None]
