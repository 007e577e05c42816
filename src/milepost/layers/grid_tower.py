"""Parts of LFM3-VL's vision tower: blocks that convolve each picture over its grid of patches, or
attend with shared keys, and then a gated feed-forward, each after a root mean square norm.

Legend: P patches of all pictures, D hidden size, H heads, G heads of keys and values, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import vision
from milepost.kernels.layout.emit import values_of
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.tower_parts import (
    Grid,
    TowerLayout,
    TowerLinear,
    TowerRun,
    TowerShapes,
    by_rows,
    fixed_norm,
)
from milepost.layers.weight_slots import fill_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class GridBlockShapes:
    """Sizes of such blocks besides a tower's."""

    num_kv_heads: int
    conv_width: int
    """Patches of the convolution's side, an odd number."""
    eps: float


class NormedEmbedding(nn.Module):
    """The projection of a patch's values, and a norm."""

    def __init__(self, shapes: TowerShapes, eps: float, scope: ModuleScope) -> None:
        super().__init__()
        size = shapes.hidden_size
        path = scope.under("patchifier")
        self.projection = TowerLinear(path, size, shapes.num_inputs, has_bias=False)
        self.norm = fixed_norm(size, eps, scope.under("embedding_norm"))

    def forward(self, values: Tensor, *, is_fixed: bool) -> Tensor:
        """Embeds the values [P, inputs] of patches."""
        return values_of(self.norm.add(self.projection(values, is_fixed=is_fixed), None)[1])


class GridBlock(nn.Module):
    """A mixer, which is a convolution or attention, and a feed-forward."""

    def __init__(
        self,
        shapes: TowerShapes,
        block_shapes: GridBlockShapes,
        mixer: Literal["conv", "full_attention"],
        scope: ModuleScope,
    ) -> None:
        super().__init__()
        size, inner = shapes.hidden_size, shapes.feed_forward_size
        self.norm1 = fixed_norm(size, block_shapes.eps, scope.under("operator_norm"))
        self.norm2 = fixed_norm(size, block_shapes.eps, scope.under("ffn_norm"))
        self.mixer: GridConv | GridAttention = (
            GridConv(shapes, block_shapes.conv_width, scope.under("conv"))
            if mixer == "conv"
            else GridAttention(shapes, block_shapes, scope.under("self_attn"))
        )
        up = [scope.under("feed_forward.w1"), scope.under("feed_forward.w3")]
        self.up = TowerLinear(up, 2 * inner, size, has_bias=False)
        down = scope.under("feed_forward.w2")
        self.down = TowerLinear(down, size, inner, has_bias=False)

    def advance(self, run: TowerRun) -> None:
        """Runs this block on the residual stream of `run`."""
        is_fixed = run.layout.is_fixed
        hidden, normed = self.norm1.add(run.hidden, run.delta)
        delta = self.mixer(values_of(normed), run.layout)
        run.hidden, normed = self.norm2.add(hidden, delta)
        gate_up = self.up(values_of(normed), is_fixed=is_fixed)
        units = by_rows(_silu_mul, gate_up, is_fixed=is_fixed)
        run.delta = self.down(units, is_fixed=is_fixed)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class GridConv(ParameterModule):
    """A depthwise convolution over the patches of each frame, between two gates."""

    def __init__(self, shapes: TowerShapes, width: int, scope: ModuleScope) -> None:
        super().__init__(scope)
        size = shapes.hidden_size
        self._merge_size, self._width = shapes.merge_size, width
        self.inputs = TowerLinear(scope.under("in_proj"), 3 * size, size, has_bias=False)
        weight = scope.empty(size, 1, width, width)
        self.weight = self.declare("spatial_conv.weight", weight, dummy=fill_matrix)
        self.out = TowerLinear(scope.under("out_proj"), size, size, has_bias=False)

    def forward(self, rows: Tensor, layout: TowerLayout) -> Tensor:
        """Mixes the patches [P, D] of each picture."""
        inputs = self.inputs(rows, is_fixed=layout.is_fixed)
        gate_in, gate_out, values = inputs.chunk(3, -1)
        lengths = [prod(grid) for grid in layout.grids]
        pictures = zip((gate_in * values).split(lengths), layout.grids, strict=True)
        mixed = [self._convolve(patches, grid) for patches, grid in pictures]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        output: Tensor = self.out(gate_out * joined, is_fixed=layout.is_fixed)
        return output

    def _convolve(self, rows: Tensor, grid: Grid) -> Tensor:
        """Convolves the frames of one picture, whose patches come token by token."""
        merge, size = self._merge_size, rows.shape[1]
        num_frames, down, across = grid[0], grid[1] // merge, grid[2] // merge
        frames = rows.view(num_frames, down, across, merge, merge, size)
        frames = frames.permute(0, 5, 1, 3, 2, 4).reshape(num_frames, size, *grid[1:])
        frames = F.conv2d(frames, self.weight, padding=self._width // 2, groups=size)
        frames = frames.view(num_frames, size, down, merge, across, merge)
        return frames.permute(0, 2, 4, 3, 5, 1).reshape(rows.shape)


class GridAttention(nn.Module):
    """Attention among all patches of a frame. Several heads share keys and values; heads of queries
    and keys are normed before they are turned."""

    def __init__(
        self, shapes: TowerShapes, block_shapes: GridBlockShapes, scope: ModuleScope
    ) -> None:
        super().__init__()
        size, dim = shapes.hidden_size, shapes.head_dim
        self._num_heads, self._num_kv_heads = shapes.num_heads, block_shapes.num_kv_heads
        self.queries = TowerLinear(scope.under("q_proj"), size, size, has_bias=False)
        shared = [scope.under("k_proj"), scope.under("v_proj")]
        self.shared = TowerLinear(shared, 2 * block_shapes.num_kv_heads * dim, size, has_bias=False)
        self.query_norm = fixed_norm(dim, block_shapes.eps, scope.under("q_layernorm"))
        self.key_norm = fixed_norm(dim, block_shapes.eps, scope.under("k_layernorm"))
        self.out = TowerLinear(scope.under("out_proj"), size, size, has_bias=False)

    def forward(self, rows: Tensor, layout: TowerLayout) -> Tensor:
        """Mixes the patches [P, D] of each frame."""
        each_row = partial(by_rows, is_fixed=layout.is_fixed)
        query = self.queries(rows, is_fixed=layout.is_fixed)
        query = query.unflatten(1, (self._num_heads, -1))
        shared = self.shared(rows, is_fixed=layout.is_fixed)
        key, value = shared.unflatten(1, (2, self._num_kv_heads, -1)).unbind(1)
        query, key = each_row(self.query_norm, query), each_row(self.key_norm, key)
        times = self._num_heads // self._num_kv_heads
        repeated = (each.repeat_interleave(times, 1) for each in (key, value))
        projected = torch.cat((query, *repeated), 1).flatten(1)
        attended = vision.attend(projected, layout.angles, self._num_heads, layout.frames)
        output: Tensor = self.out(attended, is_fixed=layout.is_fixed)
        return output
