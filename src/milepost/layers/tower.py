"""A vision tower: from pictures' patches to one embedding for each of their tokens.

    patches -> embedded, with positions -> blocks of attention and feed-forward -> merged in fours

An embedding does not depend on what is encoded with it, bit for bit: several pictures take products
of one order for any number of rows, and attention that is cut by pictures. A single one may take a
library's GEMM. Each rank has the whole tower.

Legend: P patches of all pictures, N pictures, D hidden size, H heads, E head_dim, M patches merged
into a token, C hidden size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import products, vision
from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tensors import Made, in_blocks
from milepost.kernels.vision import PictureFrames
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
    """Number of entries in the table of positions, a square number."""
    theta: float
    eps: float = 1e-6

    @property
    def num_inputs(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.num_frames * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_weights(self) -> int:
        """Number of weights that the patches of one token are multiplied by; each patch counts."""
        size, num_patches = self.hidden_size, self.merge_size**2
        block = 4 * size**2 + 2 * size * self.feed_forward_size
        merged = num_patches * size
        merger = merged * (merged + self.output_size)
        return num_patches * (self.num_inputs * size + self.depth * block) + merger


Grid = tuple[int, int, int]
"""Frames of a picture, patches of a frame from top to bottom, and patches from left to right."""


@dataclass(slots=True, kw_only=True)
class TowerRun:
    """A run of a tower, between two of its blocks, with the residual stream [P, D]."""

    hidden: Tensor
    delta: Tensor | None
    """[P, D], still to be added to the residual stream."""
    angles: tuple[Tensor, Tensor]
    frames: PictureFrames
    is_fixed: bool
    """Whether products take an order that does not depend on the number of rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        held = (self.hidden, self.delta, *self.angles)
        return sum(each.nbytes for each in held if each is not None)


def _by_rows(compute: Callable[..., Made], *rows: Tensor, is_fixed: bool) -> Made:
    """Applies `compute` to each row of `rows` [P, ...]. On a CPU, torch computes the last elements
    of a tensor with other instructions, so with `is_fixed` it gets blocks of rows."""
    is_cut = is_fixed and not runs_triton(rows[0])
    return in_blocks(compute, *rows) if is_cut else compute(*rows)


class TowerLinear(nn.Module):
    """A projection with bias. `shape` is that of the checkpoint's weight, whose dimensions after
    the first are the inputs."""

    def __init__(self, kind: ModuleScope, *shape: int) -> None:
        super().__init__()
        self.kind, self._shape = kind, shape
        self.weight = kind.empty(shape[0], torch.Size(shape[1:]).numel())
        self.bias = kind.empty(shape[0])

    def forward(self, rows: Tensor, *, is_fixed: bool) -> Tensor:
        """Multiplies `rows` [P, I]; see `TowerRun.is_fixed`."""
        if not is_fixed:
            return F.linear(rows, self.weight, self.bias)
        return products.multiply(
            rows, products.Raw(values=self.weight, batch_invariant=True), self.bias
        )

    def gelu(self, rows: Tensor, *, is_fixed: bool) -> Tensor:
        """Multiplies `rows` [P, I] and applies the GELU in its tanh approximation."""
        if not is_fixed:
            return vision.multiply_gelu(rows, self.weight, self.bias)
        gelu = partial(F.gelu, approximate="tanh")
        return _by_rows(gelu, self(rows, is_fixed=True), is_fixed=True)

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

    def advance(self, run: TowerRun) -> None:
        """Runs this block on the residual stream of `run`."""
        is_fixed = run.is_fixed
        hidden, normed = self.norm1.add(run.hidden, run.delta)
        projected = self.qkv(normed, is_fixed=is_fixed)
        attended = vision.attend(projected, run.angles, self._num_heads, run.frames)
        delta = self.proj(attended, is_fixed=is_fixed)
        run.hidden, normed = self.norm2.add(hidden, delta)
        run.delta = self.down(self.up.gelu(normed, is_fixed=is_fixed), is_fixed=is_fixed)


class Merger(nn.Module):
    """Turns M patches [P, D] into a token [P / M, C]."""

    def __init__(self, shapes: TowerShapes, kind: ModuleScope) -> None:
        super().__init__()
        self._size = shapes.hidden_size * shapes.merge_size**2
        self.norm = LayerNorm(shapes.hidden_size, shapes.eps, kind.under("norm"))
        self.first = TowerLinear(kind.under("linear_fc1"), self._size, self._size)
        self.second = TowerLinear(kind.under("linear_fc2"), shapes.output_size, self._size)

    def end(self, run: TowerRun) -> Tensor:
        """Returns the tokens of a run that has passed all blocks."""
        normed = self.norm.add(run.hidden, run.delta)[1]
        inner = self.first(normed.view(-1, self._size), is_fixed=run.is_fixed)
        inner = _by_rows(F.gelu, inner, is_fixed=run.is_fixed)
        return self.second(inner, is_fixed=run.is_fixed)


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
        self, rows: Tensor, table: Tensor, grids: Sequence[Grid], *, is_fixed: bool = False
    ) -> Tensor:
        """Returns the embeddings [P / M, C] of the pictures' tokens: `begin`, all blocks, `end`."""
        run = self.begin(rows, table, grids, is_fixed=is_fixed)
        self.advance(run, self.blocks)
        return self.end(run)

    @torch.inference_mode()
    def begin(
        self, rows: Tensor, table: Tensor, grids: Sequence[Grid], *, is_fixed: bool = False
    ) -> TowerRun:
        """Embeds the patches of pictures with these grids. `rows` [P, bytes] are their patches,
        picture by picture, with the M patches of a token one after the other. `table` [3, 256] maps
        each byte to a value in each channel, in the tower's dtype. With `is_fixed`, products use an
        order that does not depend on the number of rows, so several pictures have the same bits as
        each alone."""
        shapes, places = self.shapes, self._places(grids)
        values = vision.normalise(rows, table, shapes.num_frames, shapes.patch_size**2)
        assert is_fixed or len(grids) == 1, "several pictures take one order"
        hidden = self.embedding(values, is_fixed=is_fixed)
        turn = partial(vision.turned_angles, frequencies=self._frequencies)
        return TowerRun(
            hidden=self._with_positions(hidden, places, grids),
            delta=None,
            angles=_by_rows(turn, *places, is_fixed=is_fixed),
            frames=self._frames(grids, is_fixed=is_fixed),
            is_fixed=is_fixed,
        )

    @torch.inference_mode()
    def advance(self, run: TowerRun, blocks: Iterable[TowerBlock]) -> None:
        """Runs some of the tower's blocks on the residual stream of `run`."""
        for block in blocks:
            block.advance(run)

    @torch.inference_mode()
    def end(self, run: TowerRun) -> Tensor:
        """Returns the embeddings of the tokens of a run that has passed all blocks."""
        return self.merger.end(run)

    def _frames(self, grids: Sequence[Grid], *, is_fixed: bool) -> PictureFrames:
        lengths = tuple(rows * columns for times, rows, columns in grids for _ in range(times))
        if not is_fixed:
            return PictureFrames(starts=None, lengths=lengths)
        device = self._frequencies.device
        starts, is_cuda = [0, *accumulate(lengths)], device.type == "cuda"
        sent = torch.tensor(starts, dtype=torch.int32, pin_memory=is_cuda)
        return PictureFrames(starts=sent.to(device, non_blocking=True), lengths=lengths)

    def _with_positions(
        self, hidden: Tensor, places: tuple[Tensor, Tensor], grids: Sequence[Grid]
    ) -> Tensor:
        """Adds the positions of each picture's patches."""
        lengths = [prod(grid) for grid in grids]
        parts = zip(*(each.split(lengths) for each in (hidden, *places)), grids, strict=True)
        add, table = vision.add_positions, self.positions
        added = [add(own, table, (row, column), grid[1:]) for own, row, column, grid in parts]
        return added[0] if len(added) == 1 else torch.cat(added)

    def _places(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """Returns the row and the column of each patch [P], the patches of a token together."""
        rows, columns = zip(*map(self._places_of, grids), strict=True)
        return torch.cat(rows), torch.cat(columns)

    def _places_of(self, grid: Grid) -> tuple[Tensor, Tensor]:
        merge, (num_frames, rows, columns) = self.shapes.merge_size, grid
        index = torch.arange(num_frames * rows * columns, device=self._frequencies.device)
        token, inner = index % (rows * columns) // merge**2, index % merge**2
        across = columns // merge
        row = token // across * merge + inner // merge
        return row, token % across * merge + inner % merge

    def placements(self) -> WeightSlots:
        return {self.kind.full("pos_embed.weight"): place_whole(self.positions)}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        fill_matrix(self.positions, spread, generator)
