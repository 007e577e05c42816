"""A vision tower: from a picture's patches to one embedding for each of its tokens.

    patches -> embedded, with positions -> blocks of attention and feed-forward -> merged in fours

A tower runs one picture at a time, so an embedding does not depend on which other pictures are
encoded with it, bit for bit. Each rank has the whole tower.

Legend: P patches, D hidden size, H heads, E head_dim, M patches merged into a token, C hidden size
of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import vision
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import WeightSlots, fill_matrix, place_whole


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
    """Entries of the table of positions, a square."""
    theta: float
    eps: float = 1e-6

    @property
    def num_inputs(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.num_frames * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class TowerLinear(nn.Module):
    """A projection with bias. `shape` is that of the checkpoint's weight, whose dimensions after
    the first are the inputs."""

    def __init__(self, kind: ModuleScope, *shape: int) -> None:
        super().__init__()
        self.kind, self._shape = kind, shape
        self.weight = kind.empty(shape[0], torch.Size(shape[1:]).numel())
        self.bias = kind.empty(shape[0])

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def placements(self) -> WeightSlots:
        weight = place_whole(self.weight.view(self._shape))
        return {self.kind.full("weight"): weight, self.kind.full("bias"): place_whole(self.bias)}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the weight; the bias is zero."""
        fill_matrix(self.weight, spread, generator)
        self.bias.zero_()


class LayerNorm(nn.Module):
    """A norm over D with mean and deviation, a weight and a bias."""

    def __init__(self, size: int, eps: float, kind: ModuleScope) -> None:
        super().__init__()
        self.kind, self._eps = kind, eps
        self.weight, self.bias = kind.empty(size), kind.empty(size)

    def add(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds a layer's output to the residual stream [P, D]; returns the sum and its norm."""
        return vision.add_norm(hidden, delta, self.weight, self.bias, self._eps)

    def placements(self) -> WeightSlots:
        own = {"weight": self.weight, "bias": self.bias}
        return {self.kind.full(name): place_whole(values) for name, values in own.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        """Sets the weight to 1 and the bias to 0."""
        self.weight.fill_(1)
        self.bias.zero_()


class TowerBlock(nn.Module):
    """Attention among all patches of a frame, then a feed-forward, each after a norm."""

    def __init__(self, shapes: TowerShapes, kind: ModuleScope) -> None:
        super().__init__()
        size, inner = shapes.hidden_size, shapes.feed_forward_size
        self._num_heads = shapes.num_heads
        self.norm1 = LayerNorm(size, shapes.eps, kind.under("norm1"))
        self.norm2 = LayerNorm(size, shapes.eps, kind.under("norm2"))
        self.qkv = TowerLinear(kind.under("attn.qkv"), 3 * size, size)
        self.proj = TowerLinear(kind.under("attn.proj"), size, size)
        self.up = TowerLinear(kind.under("mlp.linear_fc1"), inner, size)
        self.down = TowerLinear(kind.under("mlp.linear_fc2"), size, inner)

    def run(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        angles: tuple[Tensor, Tensor],
        num_frames: int,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [P, D] and what is to be added to it next."""
        hidden, normed = self.norm1.add(hidden, delta)
        attended = vision.attend(self.qkv(normed), angles, self._num_heads, num_frames)
        hidden, normed = self.norm2.add(hidden, self.proj(attended))
        return hidden, self.down(vision.multiply_gelu(normed, self.up.weight, self.up.bias))


class Merger(nn.Module):
    """Turns M patches [P, D] into a token [P / M, C]."""

    def __init__(self, shapes: TowerShapes, kind: ModuleScope) -> None:
        super().__init__()
        self._size = shapes.hidden_size * shapes.merge_size**2
        self.norm = LayerNorm(shapes.hidden_size, shapes.eps, kind.under("norm"))
        self.first = TowerLinear(kind.under("linear_fc1"), self._size, self._size)
        self.second = TowerLinear(kind.under("linear_fc2"), shapes.output_size, self._size)

    def run(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Adds `delta` and merges."""
        normed = self.norm.add(hidden, delta)[1]
        return self.second(F.gelu(self.first(normed.view(-1, self._size))))


class Tower(nn.Module):
    """A vision tower with its tensors under `kind.path`."""

    def __init__(self, shapes: TowerShapes, kind: ModuleScope) -> None:
        super().__init__()
        self.shapes, self.kind = shapes, kind
        patch = (shapes.num_channels, shapes.num_frames, shapes.patch_size, shapes.patch_size)
        self.embedding = TowerLinear(kind.under("patch_embed.proj"), shapes.hidden_size, *patch)
        self.positions = kind.empty(shapes.num_positions, shapes.hidden_size)
        self.blocks = nn.ModuleList(
            TowerBlock(shapes, kind.under(f"blocks.{index}")) for index in range(shapes.depth)
        )
        self.merger = Merger(shapes, kind.under("merger"))
        exponents = torch.arange(0, shapes.head_dim // 2, 2, dtype=torch.float32)
        exponents = exponents / (shapes.head_dim // 2)
        self._frequencies = (1.0 / shapes.theta**exponents).to(kind.device)

    @torch.inference_mode()
    def forward(
        self,
        rows: Tensor,
        table: Tensor,
        grid: tuple[int, int, int],
        blocks: Iterable[TowerBlock] | None = None,
    ) -> Tensor:
        """Returns the embeddings [P / M, C] of a picture's tokens.

        `rows` [P, bytes] are its patches, the M patches of a token one after the other, and `table`
        [3, 256] has the value of each byte in each channel, in the tower's dtype. `grid` counts the
        frames, and the patches of a frame from top to bottom and from left to right. `blocks`
        replace the tower's blocks, as if it had no others.
        """
        shapes, (num_frames, *size) = self.shapes, grid
        values = vision.normalise(rows, table, shapes.num_frames, shapes.patch_size**2)
        places = self._places(grid)
        hidden = self.embedding(values)
        hidden = vision.add_positions(hidden, self.positions, places, (size[0], size[1]))
        angles, delta = vision.turned_angles(*places, self._frequencies), None
        for block in self.blocks if blocks is None else blocks:
            hidden, delta = block.run(hidden, delta, angles, num_frames)
        return self.merger.run(hidden, delta)

    def _places(self, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Returns the row and the column of each patch [P], the patches of a token together."""
        merge, (num_frames, rows, columns) = self.shapes.merge_size, grid
        index = torch.arange(num_frames * rows * columns, device=self._frequencies.device)
        token, inner = index % (rows * columns) // merge**2, index % merge**2
        across = columns // merge
        return (
            token // across * merge + inner // merge,
            token % across * merge + inner % merge,
        )

    def placements(self) -> WeightSlots:
        return {self.kind.full("pos_embed.weight"): place_whole(self.positions)}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        fill_matrix(self.positions, spread, generator)
