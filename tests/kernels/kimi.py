"""KDA's token mixer: random inputs, and what its published recurrence makes of them.

Legend: T tokens, C channels, H heads, K head_dim, J taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.recurrent import (
    DeltaWeights,
    KDAProjected,
    MixerSizes,
    RecurrentOperation,
    RecurrentRule,
)
from tests.kernels.mixers import Batch, Pools
from tests.kernels.ssd import lay_out, widen


@dataclass(frozen=True, kw_only=True)
class Shapes:
    heads: int
    head_dim: int
    taps: int = 4
    least_decay: float = 0.0

    @property
    def size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return 3 * self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the convolution's channels, betas, decay inputs and gates."""
        return (self.channels, self.heads, self.size, self.size)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.heads, self.head_dim, self.head_dim)

    @property
    def recorded(self) -> Sequence[int]:
        """Columns of what is projected that are recorded of a draft."""
        return range(sum(self.sizes[:3]))

    @property
    def operation(self) -> RecurrentOperation:
        sizes = MixerSizes(
            rule=RecurrentRule.KDA,
            units=self.heads,
            group=1,
            shared=self.head_dim,
            own=self.head_dim,
            taps=self.taps,
            least_decay=self.least_decay,
            gates_by_sigmoid=True,
        )
        return RecurrentOperation(sizes=sizes)


ODD = Shapes(heads=3, head_dim=5, taps=3)
SMALL = Shapes(heads=2, head_dim=16)
HALF = Shapes(heads=3, head_dim=64, taps=3)
REAL = Shapes(heads=32, head_dim=128)
"""Kimi-Linear-48B-A3B's."""
BOUNDED = Shapes(heads=3, head_dim=36, taps=3, least_decay=-5.0)
"""With Ling 3.0's bound of log decays."""


def make_weights(
    shapes: Shapes, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DeltaWeights:
    """The first head forgets nearly all that it holds at every token: over a chunk its decays are
    no numbers that could be divided by. The last one keeps it, unless decays have a bound."""
    random = torch.Generator().manual_seed(1)
    precise = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    most = (0.9, 0.5) if shapes.least_decay else (1.3, -2)
    return DeltaWeights(
        conv=(normal(shapes.channels, shapes.taps) * shapes.taps**-0.5).to(device, dtype),
        decay_rate=-torch.logspace(*most, shapes.heads).to(device, precise),
        decay_bias=normal(shapes.size).to(device, precise),
        norm=normal(shapes.head_dim).to(device, precise),
        norm_eps=1e-5,
    )


def run(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    pools: Pools,
    batch: Batch,
    *,
    chip: Chip | None = None,
    **capacities: int,
) -> Tensor:
    """What the reference answers, or with a chip the fused kernels, padded to `capacities`; writes
    `pools`. A batch without lengths decodes."""
    layout, slots = lay_out(shapes, batch, projected.device, chip, capacities)
    return launch(shapes, projected, weights, pools, layout, slots)


def launch(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    pools: Pools,
    layout: Any,
    slots: tuple[Tensor, Tensor],
    records: Tensor | None = None,
) -> Tensor:
    """One layer's call, of a step that has been laid out."""
    first = sum(shapes.sizes[:2])
    decay, gate = (each.contiguous() for each in projected[:, first:].chunk(2, -1))
    inputs = KDAProjected(projected[:, :first], decay, gate)
    return shapes.operation.mix(inputs, weights, pools.states(slots, records), layout)


def recur(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    conv_state: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence token by token, in float64: outputs [T, H * K], the convolution's state, the
    recurrence's."""
    weights, conv_state, state = widen(weights), conv_state.double(), state.double()
    outputs = []
    for newest, beta, decay, gate in zip(*projected.double().split(shapes.sizes, -1), strict=True):
        window = torch.cat((conv_state, newest[:, None]), 1)
        conv_state = window[:, 1:]
        mixed = F.silu((window * weights.conv).sum(1)).view(3, shapes.heads, -1)
        query, key = (
            each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in mixed[:2]
        )
        wide = (decay + weights.decay_bias).view(shapes.heads, -1)
        rate, least = weights.decay_rate[:, None], shapes.least_decay
        log_decay = least * (-rate * wide).sigmoid() if least else rate * F.softplus(wide)
        state = state * log_decay.exp()[..., None]
        missing = mixed[2] - torch.einsum("hkw,hk->hw", state, key)
        state = state + torch.einsum("hk,hw,h->hkw", key, missing, beta.sigmoid())
        read = torch.einsum("hkw,hk->hw", state, query) * shapes.head_dim**-0.5
        scale = (read.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt()
        outputs.append((read * scale * weights.norm).flatten() * gate.sigmoid())
    return torch.stack(outputs), conv_state, state
