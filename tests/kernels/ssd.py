"""Mamba2's token mixer: random inputs, and what its published recurrence makes of them.

Legend: T tokens, C channels, H heads, P head_dim, G groups, N state_size, J taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.batch import Batch as Step
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
from milepost.kernels.recurrent import (
    Mamba2Weights,
    MixerSizes,
    RecurrentOperation,
    RecurrentRule,
    choose_chunk,
)
from milepost.runner.staging import on_device
from tests.kernels.mixers import Batch, Pools


@dataclass(frozen=True, kw_only=True)
class Shapes:
    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int = 4
    chunk: int = 16
    norm_before_gate: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.inner, self.channels, self.heads)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.heads, self.head_dim, self.state_size)

    @property
    def recorded(self) -> Sequence[int]:
        """Columns of what is projected that are recorded of a draft."""
        return range(self.inner, sum(self.sizes))

    @property
    def operation(self) -> RecurrentOperation:
        sizes = MixerSizes(
            rule=RecurrentRule.MAMBA2,
            units=self.groups,
            group=self.heads // self.groups,
            shared=self.state_size,
            own=self.head_dim,
            taps=self.taps,
            gates_first=not self.norm_before_gate,
        )
        return RecurrentOperation(sizes=sizes, chunk=self.chunk)


ONE_GROUP = Shapes(heads=3, head_dim=5, groups=1, state_size=7, taps=3)
GROUPS = Shapes(heads=16, head_dim=4, groups=8, state_size=6)
NEMOTRON = Shapes(heads=64, head_dim=64, groups=8, state_size=128, chunk=128)
"""Nemotron-3-Nano's."""
BAMBA = Shapes(heads=128, head_dim=64, groups=1, state_size=128, chunk=choose_chunk(256))


def make_weights(
    shapes: Shapes, dtype: torch.dtype = torch.float32, device: str = "cpu", **others: object
) -> Mamba2Weights:
    random = torch.Generator().manual_seed(1)
    precise = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    weights = Mamba2Weights(
        conv=(normal(shapes.channels, shapes.taps) * shapes.taps**-0.5).to(device, dtype),
        conv_bias=(0.3 * normal(shapes.channels)).to(device, dtype),
        rate=-(0.3 * normal(shapes.heads)).exp().to(device, precise) * 0.3,
        dt_bias=(normal(shapes.heads) - 1).to(device, precise),
        skip=normal(shapes.heads).to(device, precise),
        norm=normal(shapes.inner).to(device, precise),
        norm_eps=1e-5,
        dt_limit=(0.0, float("inf")),
    )
    return weights._replace(**others)


def run(
    shapes: Shapes,
    projected: Tensor,
    weights: Mamba2Weights,
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
    weights: Mamba2Weights,
    pools: Pools,
    layout: Any,
    slots: tuple[Tensor, Tensor],
    records: Tensor | None = None,
) -> Tensor:
    """One layer's call, of a step that has been laid out."""
    return shapes.operation.mix(projected, weights, pools.states(slots, records), layout)


class HasOperation(Protocol):
    """Shapes of a mixer, this one or another."""

    @property
    def operation(self) -> RecurrentOperation: ...


def lay_out(
    shapes: HasOperation,
    batch: Batch,
    device: torch.device,
    chip: Chip | None,
    capacities: Mapping[str, int],
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As the runner would have it."""
    count, decodes = len(batch.slot_out), not batch.lengths
    lengths = np.array(batch.lengths or [1] * count)
    sizes = {"num_tokens": int(lengths.sum()), "num_sequences": count}
    step = Step(
        starts=np.array(batch.starts or [0] * count),
        lengths=lengths,
        num_decodes=count if decodes else 0,
        folds=np.zeros(count, np.int64),
        record_rows=np.full(count, -1),
        rows=np.arange(count),
        kv_rows=np.empty(0, np.int64),
        slot_in=np.array(batch.slot_in, np.int64),
        slot_out=np.array(batch.slot_out, np.int64),
        exports=tuple(batch.exports),
        tables=np.empty((0, 0), np.int32),
        page_size=64,
        page_rows=0,
        capacity=Capacity(
            **{**sizes, "num_exports": len(batch.exports), **capacities}, decodes=decodes
        ),
        device=device,
        chip=chip,
    )
    layout = on_device(shapes.operation.lay_out(step), device)
    padding = step.capacity.num_sequences - count
    read, written = (
        F.pad(each, (0, padding), value=value)  # as an engine has it
        for each, value in zip(batch.slots(device), (0, -1), strict=True)
    )
    return layout, (read, written)


def widen(weights: Mamba2Weights) -> Mamba2Weights:
    """All in float64."""
    return type(weights)(*(each.double() if isinstance(each, Tensor) else each for each in weights))


def recur(
    shapes: Shapes,
    projected: Tensor,
    weights: Mamba2Weights,
    conv_state: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence token by token, in float64: outputs [T, H * P], the convolution's state, the
    recurrence's."""
    weights, conv_state, state = widen(weights), conv_state.double(), state.double()
    outputs = []
    for gate, newest, steps in zip(*projected.double().split(shapes.sizes, -1), strict=True):
        window = torch.cat((conv_state, newest[:, None]), 1)
        conv_state = window[:, 1:]
        mixed = (window * weights.conv).sum(1)
        if weights.conv_bias is not None:
            mixed = mixed + weights.conv_bias
        sizes = shapes.inner, *[shapes.groups * shapes.state_size] * 2
        x, b, c = F.silu(mixed).split(sizes)
        x = x.view(shapes.heads, shapes.head_dim)
        b, c = (
            each.view(shapes.groups, -1).repeat_interleave(shapes.heads // shapes.groups, 0)
            for each in (b, c)
        )
        dt = F.softplus(steps + weights.dt_bias).clamp(*weights.dt_limit)
        kept = (dt * weights.rate).exp()[:, None, None]
        state = kept * state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        y = torch.einsum("hpn,hn->hp", state, c) + weights.skip[:, None] * x
        outputs.append(_norm(y.flatten(), F.silu(gate), weights, shapes))
    return torch.stack(outputs), conv_state, state


def _norm(y: Tensor, gate: Tensor, weights: Mamba2Weights, shapes: Shapes) -> Tensor:
    if weights.norm is None:
        return y * gate
    y = y if shapes.norm_before_gate else y * gate
    grouped = y.view(shapes.groups, -1)
    scale = (grouped.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt()
    y = (grouped * scale).flatten() * weights.norm
    return y * gate if shapes.norm_before_gate else y


def split(rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Those of each sequence."""
    return rows.split(list(lengths))
