"""Gated DeltaNet's token mixer: random inputs, and what the references make of them.

Legend: T tokens, S sequences, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.layout.batch import Operation
from milepost.kernels.layout.chunks import ChunkLayout, ChunkRows, lay_out, lay_out_chunks
from milepost.kernels.platform.device import probe
from milepost.kernels.recurrent import (
    CHUNK,
    DecodeLayout,
    DeltaWeights,
    LayerStates,
    MixerSizes,
    RecurrentOperation,
    RecurrentRule,
    lay_out_decodes,
    needs_arrivals,
)
from milepost.kernels.recurrent.reference import delta as reference
from milepost.runner.staging import on_device
from tests.numbers import relative_error

Export = tuple[int, int, int]


class MixerShapes(Protocol):
    """What inputs and states are made by, whichever mixer reads them."""

    @property
    def channels(self) -> int: ...
    @property
    def taps(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def state_shape(self) -> tuple[int, int, int]: ...
    @property
    def recorded(self) -> Sequence[int]: ...
    @property
    def operation(self) -> Operation: ...


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of Gated DeltaNet's mixer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    max_beta: float = 1.0
    gates_by_sigmoid: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of what is projected."""
        return (self.channels, self.values, self.value_heads, self.value_heads)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def recorded(self) -> Sequence[int]:
        """Columns of what is projected that are recorded of a draft."""
        return [*range(self.channels), *range(-2 * self.value_heads, 0)]

    @property
    def operation(self) -> RecurrentOperation:
        sizes = MixerSizes(
            rule=RecurrentRule.GATED_DELTA,
            units=self.key_heads,
            group=self.value_heads // self.key_heads,
            shared=self.key_dim,
            own=self.value_dim,
            taps=self.taps,
            max_beta=self.max_beta,
            gates_by_sigmoid=self.gates_by_sigmoid,
        )
        return RecurrentOperation(sizes=sizes)


ODD = Shapes(key_heads=2, value_heads=6, key_dim=8, value_dim=5, max_beta=2.0)
FEW_HEADS = Shapes(key_heads=1, value_heads=3, key_dim=8, value_dim=5)
"""Where bits are compared with bits and the interpreter takes its time."""
SMALL = Shapes(key_heads=1, value_heads=2, key_dim=32, value_dim=16, taps=3, max_beta=2.0)
REAL = Shapes(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
OLMO = Shapes(key_heads=30, value_heads=30, key_dim=96, value_dim=192, max_beta=2.0)
SPACING = 1024
"""Elements between slots: as where they lie between pages."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Slot 0 zeros, slots 1 and 2 states, all others NaN, as is what lies between slots."""

    conv: Tensor
    recurrent: Tensor

    def states(self, slots: tuple[Tensor, Tensor], records: Tensor | None = None) -> LayerStates:
        return LayerStates(self.conv, self.recurrent, *slots, records)

    def clone(self, spacing: int = SPACING) -> Pools:
        return Pools(conv=space(self.conv, spacing), recurrent=space(self.recurrent, spacing))


def space(pool: Tensor, spacing: int) -> Tensor:
    """A copy with so many elements between slots."""
    size = pool[0].numel()
    memory = pool.new_full((len(pool), size + spacing), torch.nan)
    return memory[:, :size].unflatten(1, pool.shape[1:]).copy_(pool)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences, sequence after sequence in a projection's rows."""

    starts: Sequence[int]
    lengths: Sequence[int]
    slot_in: Sequence[int]
    slot_out: Sequence[int]
    exports: Sequence[Export] = ()

    def slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.tensor(list(slots), dtype=torch.int32, device=device)
            for slots in (self.slot_in, self.slot_out)
        )


LONG_BATCHES = {
    "suffix": Batch(starts=[4096], lengths=[64], slot_in=[1], slot_out=[3]),
    "long": Batch(
        starts=[100], lengths=[2000], slot_in=[1], slot_out=[1], exports=[(0, 640, 3), (0, 777, 4)]
    ),
    "mixed": Batch(
        starts=[300, 5, 62, 0, 63, 1000],
        lengths=[1, 1, 200, 2, 3, 97],
        slot_in=[1, 2, 1, 0, 0, 2],
        slot_out=[3, 4, 5, 6, 7, 8],
        exports=[(2, 128, 9), (2, 131, 10), (5, 1024, 11), (5, 1097, 12)],
    ),
}
"""A prompt's end, a long one, and many beside each other."""


def make_weights(
    shapes: Shapes, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DeltaWeights:
    random = torch.Generator().manual_seed(1)
    heads = shapes.value_heads
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.randn(shapes.channels, shapes.taps, generator=random) * shapes.taps**-0.5
    return DeltaWeights(
        conv=weight.to(device, dtype),
        decay_rate=(-0.3 * torch.rand(heads, generator=random)).to(device, precise),
        decay_bias=torch.randn(heads, generator=random).to(device, precise),
        norm=torch.randn(shapes.value_dim, generator=random).to(device, precise),
        norm_eps=1e-6,
    )


def make_projected(
    shapes: MixerShapes,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 2,
) -> Tensor:
    """[T, ...], rows of a wider matrix."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(num_tokens, sum(shapes.sizes) + 3, generator=random)
    return wide.to(device, dtype)[:, : sum(shapes.sizes)]


def make_pools(
    shapes: MixerShapes,
    num_slots: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    state_dtype: torch.dtype = torch.float32,
    spacing: int = SPACING,
) -> Pools:
    random = torch.Generator().manual_seed(3)
    conv_pool = torch.full((num_slots, shapes.channels, shapes.taps - 1), torch.nan)
    recurrent_pool = torch.full((num_slots, *shapes.state_shape), torch.nan)
    for pool in (conv_pool, recurrent_pool):
        pool[0] = 0
        pool[1:3] = torch.randn(pool[1:3].shape, generator=random)
    return Pools(
        conv=space(conv_pool.to(device, dtype), spacing),
        recurrent=space(recurrent_pool.to(device, state_dtype), spacing),
    )


def assert_pools_match(actual: Pools, expected: Pools, tolerance: float) -> None:
    """The same slots are written, with nearly the same states."""
    for ours, theirs in ((actual.conv, expected.conv), (actual.recurrent, expected.recurrent)):
        written = theirs.flatten(1).isfinite().all(1)
        assert torch.equal(ours.flatten(1).isfinite().all(1), written)
        assert ours[~written].isnan().all()
        assert relative_error(ours[written], theirs[written]) < tolerance


def assert_pools_equal(actual: Pools, expected: Pools) -> None:
    """Bit for bit, and what one has not written the other has not."""
    for ours, theirs in ((actual.conv, expected.conv), (actual.recurrent, expected.recurrent)):
        assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))


def widen(weights: DeltaWeights, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    """All in one type."""
    return DeltaWeights(*(each.to(dtype) if isinstance(each, Tensor) else each for each in weights))


def expected_prefill(
    shapes: Shapes, projected: Tensor, weights: DeltaWeights, pools: Pools, batch: Batch
) -> Tensor:
    """What the references answer, in float32; writes `pools`."""
    layouts = (
        conv.lay_out_windows(
            batch.starts, batch.lengths, batch.exports, shapes.taps, projected.device
        ),
        lay_out_chunks(
            batch.starts, batch.lengths, batch.exports, chunk=CHUNK, device=projected.device
        ),
    )
    return _expected(shapes, projected, weights, pools, batch, layouts)


def expected_decode(
    shapes: Shapes, projected: Tensor, weights: DeltaWeights, pools: Pools, batch: Batch
) -> Tensor:
    """As `expected_prefill`, one token a sequence."""
    return _expected(shapes, projected, weights, pools, batch, None)


def _expected(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    pools: Pools,
    batch: Batch,
    layouts: tuple[conv.ConvLayout, ChunkRows] | None,
) -> Tensor:
    weights, slots = widen(weights), batch.slots(projected.device)
    slots = tuple(each.long() for each in slots)
    mixed, gate, strength, decay = projected.float().split(shapes.sizes, -1)
    beta = strength.sigmoid() * shapes.max_beta
    log_decay = F.softplus(decay + weights.decay_bias) * weights.decay_rate
    if layouts is None:
        mixed = conv.decode(mixed, weights.conv, None, pools.conv, *slots)
    else:
        mixed = conv.prefill(mixed, weights.conv, None, pools.conv, *slots, layouts[0])
    query_key, value = mixed.split((shapes.channels - shapes.values, shapes.values), -1)
    query_key = query_key.unflatten(-1, (2, shapes.key_heads, shapes.key_dim))
    value = value.unflatten(-1, (-1, shapes.value_dim))
    inputs = query_key, value, log_decay, beta, pools.recurrent, *slots
    if layouts is None:
        output = reference.decode(*inputs)
    else:
        output = reference.prefill(*inputs, layouts[1])
    gate = gate.unflatten(-1, (-1, shapes.value_dim))
    normed = F.rms_norm(output, output.shape[-1:], weights.norm, weights.norm_eps)
    opened = gate.sigmoid() if shapes.gates_by_sigmoid else F.silu(gate)
    return (normed * opened).flatten(1)


def send_layout(chunks: ChunkLayout, device: torch.device | str) -> ChunkLayout:
    """The layout with tensors in place of arrays."""
    return on_device(chunks, torch.device(device))


def fused_prefill(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    pools: Pools,
    batch: Batch,
    **capacities: int,
) -> Tensor:
    """What the fused kernels answer, padded to `capacities`; writes `pools`."""
    chunks, slots = _laid_out(batch, projected.device, capacities)
    return shapes.operation.mix(projected, weights, pools.states(slots), chunks)


def captured_prefill(
    shapes: Shapes, weights: DeltaWeights, pools: Pools, capacities: dict[str, int]
) -> Callable[[Tensor, Batch], Tensor]:
    """`fused_prefill` of any batch within `capacities` as replays of one CUDA graph."""
    device = weights.conv.device
    empty = Batch(starts=[], lengths=[], slot_in=[], slot_out=[])
    chunks, slots = _laid_out(empty, device, capacities)
    projected = make_projected(shapes, capacities["max_tokens"], weights.conv.dtype, device.type)
    arguments = projected, weights, pools.states(slots), chunks
    shapes.operation.mix(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = shapes.operation.mix(*arguments)

    def replay(rows: Tensor, batch: Batch) -> Tensor:
        projected.copy_(rows)
        new_chunks, new_slots = _laid_out(batch, device, capacities)
        for old, new in zip(slots, new_slots, strict=True):
            old.copy_(new)
        for each in fields(chunks):
            if each.name != "chunk":
                getattr(chunks, each.name).copy_(getattr(new_chunks, each.name))
        graph.replay()
        return output

    return replay


def _laid_out(
    batch: Batch, device: torch.device, capacities: dict[str, int]
) -> tuple[ChunkLayout, tuple[Tensor, Tensor]]:
    chunks = lay_out(batch.starts, batch.lengths, batch.exports, chunk=CHUNK, **capacities)
    padding = len(chunks.sequence_begin) - 1 - len(batch.starts)
    read, written = (
        F.pad(each, (0, padding), value=value)  # as an engine has it
        for each, value in zip(batch.slots(device), (0, -1), strict=True)
    )
    return send_layout(chunks, device), (read, written)


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
    return shapes.operation.mix(projected, weights, pools.states(slots, records), layout)


def fused_decode(
    shapes: Shapes,
    projected: Tensor,
    weights: DeltaWeights,
    pools: Pools,
    batch: Batch,
) -> Tensor:
    slots = batch.slots(projected.device)
    layout = on_device(lay_out_decode(shapes, len(projected)), projected.device)
    return shapes.operation.mix(projected, weights, pools.states(slots), layout)


def lay_out_decode(shapes: Shapes, num_sequences: int) -> DecodeLayout:
    """As an engine does on this machine's device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_arrivals = needs_arrivals(shapes.operation.sizes, num_sequences, probe(device))
    return lay_out_decodes(num_sequences, shapes.key_heads if has_arrivals else 0)
