"""Parts of a vision tower: sizes and names, a run between two blocks, projections, norms and
blocks.

Legend: P patches of all pictures, D hidden size, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import products, vision
from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import Made, in_blocks
from milepost.kernels.vision import PictureFrames
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.weight_slots import WeightSlot, WeightSlots, fill_matrix, place_whole

TableFit = Literal["corners", "averaged", "cropped"]
"""How a table of positions is fitted to a picture: with its corners at the picture's and linear
steps in between; resized as pictures are, by averages where it is made smaller; or resized linearly
to a square around the picture."""
Grid = tuple[int, int, int]
"""Frames of a picture, patches of a frame from top to bottom, and patches from left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShapes:
    """Sizes of a tower."""

    depth: int
    hidden_size: int
    num_heads: int
    feed_forward_size: int
    output_size: int
    """Hidden size of the model."""
    patch_size: int
    merge_size: int
    num_frames: int
    """Frames of a patch."""
    num_channels: int
    num_positions: int
    """Number of entries in the table of positions, a square number; 0 without a table."""
    theta: float | None
    """Base of the frequencies by which heads are turned; None if they are not."""
    eps: float = 1e-6
    merger_size: int | None = None
    """Size between the merger's two projections; that of the merged patches if None."""
    table_fit: TableFit = "corners"
    is_gated: bool = False
    """Whether feed-forwards have a gate, and so three matrices."""
    num_attending: int | None = None
    """Number of blocks with attention; all if None."""
    gelu: Literal["tanh", "none"] = "tanh"
    """How the GELU of feed-forwards is approximated, by torch's names."""
    num_prefix: int = 0
    """Number of learned rows ahead of each picture's patches, which patches attend to."""
    reads_floats: bool = False
    """Whether patches are normalised float32 values instead of bytes."""

    @property
    def num_inputs(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.num_frames * self.patch_size**2

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of a patch, as it is sent."""
        return self.num_channels * self.patch_size**2 * (4 if self.reads_floats else 1)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_weights(self) -> int:
        """Number of weights that the patches of one token are multiplied by; each patch counts."""
        size, num_patches = self.hidden_size, self.merge_size**2
        block = 4 * size**2 + (3 if self.is_gated else 2) * size * self.feed_forward_size
        merged = num_patches * size
        inner = self.merger_size or merged
        merger = inner * (merged + self.output_size)
        return num_patches * (self.num_inputs * size + self.depth * block) + merger


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Paths of a tower's tensors below its own; the defaults are Qwen3.5's."""

    embedding: str = "patch_embed.proj"
    has_channels_last: bool = False
    """Whether the embedding's inputs are in the order of rows, columns and channels."""
    positions: str = "pos_embed.weight"
    has_batch: bool = False
    """Whether the table of positions has a first dimension of one."""
    prefix: str = ""
    block: str = "blocks.{index}"
    norms: tuple[str, str] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)
    """One projection, or those of queries, keys and values."""
    out: str = "attn.proj"
    feed_forward: tuple[str, str] = ("mlp.linear_fc1", "mlp.linear_fc2")
    norm: str = "merger.norm"
    """The norm over patches before they are merged."""
    merged_norm: str | None = None
    """A norm over the merged patches; None if there is none. It and the merger's projections are
    below the path of the merger."""
    merger: tuple[str, str] = ("merger.linear_fc1", "merger.linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayout:
    """Arrays of a run that follow from its pictures' grids alone, so a graph computes them once."""

    grids: tuple[Grid, ...]
    places: tuple[Tensor, Tensor]
    """Row and column of each patch [P], the patches of a token together."""
    angles: tuple[Tensor, Tensor]
    """Cosines and sines by which the heads of each patch are turned."""
    frames: PictureFrames
    is_fixed: bool
    """Whether products take an order that does not depend on the number of rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        return sum(each.nbytes for each in (*self.places, *self.angles))


@dataclass(slots=True, kw_only=True)
class TowerRun:
    """A run of a tower, between two of its blocks, with the residual stream [P, D]."""

    hidden: Tensor
    delta: Tensor | None
    """[P, D], still to be added to the residual stream."""
    layout: TowerLayout

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        held = (self.hidden, self.delta, *self.layout.angles)
        return sum(each.nbytes for each in held if each is not None)


def by_rows(compute: Callable[..., Made], *rows: Tensor, is_fixed: bool) -> Made:
    """Applies `compute` to each row of `rows` [P, ...]. On a CPU, torch computes the last elements
    of a tensor with other instructions, so with `is_fixed` it gets blocks of rows."""
    is_cut = is_fixed and not runs_triton(rows[0])
    return in_blocks(compute, *rows) if is_cut else compute(*rows)


class TowerLinear(nn.Module):
    """A projection, with a bias or without. `shape` is that of the checkpoint's weight, whose
    dimensions after the first are the inputs; or of several with equal parts of the outputs, at the
    paths of `scopes`. Checkpoints may have the dimensions in another order, `stored`, and all
    inputs in one."""

    def __init__(
        self,
        scopes: ModuleScope | Sequence[ModuleScope],
        *shape: int,
        has_bias: bool = True,
        stored: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._scopes = [scopes] if isinstance(scopes, ModuleScope) else scopes
        scope, self._shape, self._stored = self._scopes[0], shape, stored
        self.weight = scope.empty(shape[0], torch.Size(shape[1:]).numel())
        self.bias = scope.empty(shape[0]) if has_bias else None

    def forward(self, rows: Tensor, *, is_fixed: bool) -> Tensor:
        """Multiplies `rows` [P, I]; see `TowerLayout.is_fixed`."""
        if not is_fixed:
            return F.linear(rows, self.weight, self.bias)
        return products.multiply(
            rows, products.Raw(values=self.weight, order=SumOrder.FIXED), self.bias
        )

    def gelu(self, rows: Tensor, *, is_fixed: bool, approximate: str = "tanh") -> Tensor:
        """Multiplies `rows` [P, I] and applies the GELU; see `TowerShapes.gelu`."""
        if not is_fixed and approximate == "tanh":
            assert self.bias is not None, "units have biases"
            return vision.multiply_gelu(rows, self.weight, self.bias)
        gelu = partial(F.gelu, approximate=approximate)
        return by_rows(gelu, self(rows, is_fixed=is_fixed), is_fixed=is_fixed)

    def placements(self) -> WeightSlots:
        count, tensors = len(self._scopes), {"weight": self.weight.view(self._shape)}
        if self.bias is not None:
            tensors["bias"] = self.bias
        slots = {
            scope.full(name): place_whole(values)
            for name, whole in tensors.items()
            for scope, values in zip(self._scopes, whole.chunk(count), strict=True)
        }
        if self._stored:
            slots[self._scopes[0].full("weight")] = self._place_reordered()
        return slots

    def _place_reordered(self) -> WeightSlot:
        shape = tuple(self._shape[dim] for dim in self._stored)
        target = self.weight.view(self._shape).permute(*self._stored)
        return WeightSlot(tuple(self.weight.shape), lambda values: target.copy_(values.view(shape)))

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the weight; a bias is zero."""
        fill_matrix(self.weight, spread, generator)
        if self.bias is not None:
            self.bias.zero_()


def patch_embedding(shapes: TowerShapes, names: TowerNames, scope: ModuleScope) -> TowerLinear:
    """Returns the projection of a patch's values; its inputs are channels, frames and places."""
    side = shapes.patch_size
    patch = (shapes.num_channels, shapes.num_frames, side, side)
    stored = (0, 2, 3, 4, 1) if names.has_channels_last else ()
    path = scope.under(names.embedding)
    return TowerLinear(path, shapes.hidden_size, *patch, stored=stored)


def fixed_norm(size: int, eps: float, scope: ModuleScope) -> RMSNorm:
    """Returns a root mean square norm whose bits do not depend on the number of rows."""
    return RMSNorm(size, eps, replace(scope, order=SumOrder.FIXED))


class LayerNorm(ParameterModule):
    """A norm over D with mean and deviation, a weight and a bias."""

    def __init__(self, size: int, eps: float, scope: ModuleScope) -> None:
        super().__init__(scope)
        self._eps = eps
        self.weight = self.declare("weight", scope.empty(size))
        self.bias = self.declare("bias", scope.empty(size), dummy=0)

    def add(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds a layer's output to the residual stream [P, D]; returns the sum and its norm."""
        return vision.add_norm(hidden, delta, self.weight, self.bias, self._eps)


class TowerBlock(nn.Module):
    """Attention among all patches of a frame, then a feed-forward, each after a norm."""

    def __init__(self, shapes: TowerShapes, names: TowerNames, scope: ModuleScope) -> None:
        super().__init__()
        size, inner = shapes.hidden_size, shapes.feed_forward_size
        self._num_heads, self._gelu = shapes.num_heads, shapes.gelu
        first, second = map(scope.under, names.norms)
        self.norm1 = LayerNorm(size, shapes.eps, first)
        self.norm2 = LayerNorm(size, shapes.eps, second)
        self.qkv = TowerLinear(list(map(scope.under, names.qkv)), 3 * size, size)
        self.proj = TowerLinear(scope.under(names.out), size, size)
        up, down = map(scope.under, names.feed_forward)
        self.up = TowerLinear(up, inner, size)
        self.down = TowerLinear(down, size, inner)

    def advance(self, run: TowerRun) -> None:
        """Runs this block on the residual stream of `run`."""
        layout, is_fixed = run.layout, run.layout.is_fixed
        hidden, normed = self.norm1.add(run.hidden, run.delta)
        projected = self.qkv(normed, is_fixed=is_fixed)
        attended = vision.attend(projected, layout.angles, self._num_heads, layout.frames)
        delta = self.proj(attended, is_fixed=is_fixed)
        run.hidden, normed = self.norm2.add(hidden, delta)
        units = self.up.gelu(normed, is_fixed=is_fixed, approximate=self._gelu)
        run.delta = self.down(units, is_fixed=is_fixed)
