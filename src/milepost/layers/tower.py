"""A vision tower: from pictures' patches to one embedding for each of their tokens.

    patches -> embedded, with positions -> blocks of attention and feed-forward -> merged in fours

An embedding does not depend on what is encoded with it, bit for bit: several pictures take products
of one order for any number of rows, and attention that is cut by pictures. A single one may take a
library's GEMM. Each rank has the whole tower.

Legend: P patches of all pictures, N pictures, D hidden size, H heads, E head_dim, M patches merged
into a token, C hidden size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import vision
from milepost.kernels.vision import PictureFrames
from milepost.layers.mergers import Merger, TowerEnd
from milepost.layers.parameters import ModuleScope, ParameterModule, module_list
from milepost.layers.tower_parts import (
    Grid,
    TowerBlock,
    TowerLayout,
    TowerNames,
    TowerRun,
    TowerShapes,
    by_rows,
    patch_embedding,
)
from milepost.layers.weight_slots import fill_matrix, place_whole

_FITS = {
    "corners": vision.add_positions,
    "averaged": vision.add_averaged_positions,
    "cropped": vision.add_cropped_positions,
}


class TowerStep(Protocol):
    """One block of a tower. It is also a module."""

    def advance(self, run: TowerRun) -> None:
        """Runs the block on the residual stream of `run`."""
        ...

    def children(self) -> Iterator[nn.Module]:
        """See `nn.Module.children`."""


class TowerModules(NamedTuple):
    """The layers of a tower, without its table of positions."""

    embedding: nn.Module
    """Makes rows of pixels into patches, as that of `patch_embedding` does."""
    blocks: Sequence[TowerStep]
    merger: TowerEnd


class Tower(ParameterModule):
    """A vision tower with its tensors under `scope.path`, but for those of a merger under
    `merger_scope.path`. `modules` are its layers if they are no transformer's."""

    def __init__(
        self,
        shapes: TowerShapes,
        scope: ModuleScope,
        names: TowerNames | None = None,
        merger_scope: ModuleScope | None = None,
        modules: TowerModules | None = None,
    ) -> None:
        super().__init__(scope)
        names = names or TowerNames()
        self.shapes = shapes
        modules = modules or _transformer(shapes, names, scope, merger_scope or scope)
        self.embedding, self.blocks, self.merger = modules
        self.positions = self.prefix = None
        if shapes.num_positions:
            table = scope.empty(shapes.num_positions, shapes.hidden_size)
            self.positions = self.declare(
                names.positions,
                table,
                place=lambda table: place_whole(table[None] if names.has_batch else table),
                dummy=fill_matrix,
            )
        if shapes.num_prefix:
            assert shapes.theta is None, "the prefix has no place to turn by"
            prefix = scope.empty(shapes.num_prefix, shapes.hidden_size)
            self.prefix = self.declare(names.prefix, prefix, dummy=fill_matrix)
        exponents = torch.arange(0, shapes.head_dim // 2, 2, dtype=torch.float32)
        frequencies = 1.0 / (shapes.theta or 1.0) ** (exponents / (shapes.head_dim // 2))
        # Angles of zero turn nothing.
        self._frequencies = (frequencies * (shapes.theta is not None)).to(scope.device)

    @torch.inference_mode()
    def forward(
        self, rows: Tensor, table: Tensor, grids: Sequence[Grid], *, is_fixed: bool = False
    ) -> Tensor:
        """Returns the embeddings [P / M, C] of the pictures' tokens: `lay_out`, then `run`."""
        return self.run(rows, table, self.lay_out(grids, is_fixed=is_fixed))

    @torch.inference_mode()
    def lay_out(self, grids: Sequence[Grid], *, is_fixed: bool = False) -> TowerLayout:
        """Returns the arrays that depend on the pictures' grids alone, not on their patches. With
        `is_fixed`, products use an order that does not depend on the number of rows, so several
        pictures have the same bits as each alone."""
        assert is_fixed or len(grids) == 1, "several pictures take one order"
        places = self._places(grids)
        num_more = self.shapes.num_prefix * len(grids)
        turned = [F.pad(each, (0, num_more)) for each in places] if num_more else places
        turn = partial(vision.turned_angles, frequencies=self._frequencies)
        cosines, sines = by_rows(turn, *turned, is_fixed=is_fixed)
        return TowerLayout(
            grids=tuple(grids),
            places=places,
            angles=(cosines, sines),
            frames=self._frames(grids, is_fixed=is_fixed),
            is_fixed=is_fixed,
        )

    @torch.inference_mode()
    def run(self, rows: Tensor, table: Tensor, layout: TowerLayout) -> Tensor:
        """Returns the embeddings [P / M, C] of the pictures' tokens: `begin`, all blocks, `end`.
        Nothing in it waits for the host or reads its memory, so it can be captured."""
        run = self.begin(rows, table, layout)
        self.advance(run)
        return self.end(run)

    @torch.inference_mode()
    def begin(self, rows: Tensor, table: Tensor, layout: TowerLayout) -> TowerRun:
        """Embeds the patches of pictures. `rows` [P, bytes] are their patches, picture by picture,
        with the M patches of a token one after the other. `table` [3, 256] maps each byte to a
        value in each channel, in the tower's dtype, unless the tower reads floats."""
        shapes = self.shapes
        if shapes.reads_floats:
            values = rows.view(torch.float32).to(table.dtype)
        else:
            values = vision.normalise(rows, table, shapes.num_frames, shapes.patch_size**2)
        hidden = self.embedding(values, is_fixed=layout.is_fixed)
        if self.positions is not None:
            hidden = self._with_positions(hidden, self.positions, layout)
        if self.prefix is not None:
            pictures = hidden.split([prod(grid) for grid in layout.grids])
            hidden = torch.cat([each for patches in pictures for each in (self.prefix, patches)])
        return TowerRun(hidden=hidden, delta=None, layout=layout)

    @torch.inference_mode()
    def advance(self, run: TowerRun, first: int = 0, end: int | None = None) -> None:
        """Runs the tower's blocks [first, end), by default all, on the residual stream of `run`."""
        for block in self.blocks[first:end]:
            block.advance(run)

    @torch.inference_mode()
    def end(self, run: TowerRun) -> Tensor:
        """Returns the embeddings of the tokens of a run that has passed all blocks."""
        if self.prefix is not None:
            run.hidden = self._patches(run.hidden, run)
            run.delta = None if run.delta is None else self._patches(run.delta, run)
        return self.merger.end(run)

    def one_of_each_kind(self) -> list[int]:
        """Returns the number of a block of each kind; all others are like one of them."""
        kinds = (tuple(map(type, block.children())) for block in self.blocks)
        return list({kind: number for number, kind in enumerate(kinds)}.values())

    def _patches(self, rows: Tensor, run: TowerRun) -> Tensor:
        """Returns rows without those of prefixes."""
        count = self.shapes.num_prefix
        pictures = rows.split([count + prod(grid) for grid in run.layout.grids])
        return torch.cat([each[count:] for each in pictures])

    def _frames(self, grids: Sequence[Grid], *, is_fixed: bool) -> PictureFrames:
        lengths = tuple(
            self.shapes.num_prefix + rows * columns
            for times, rows, columns in grids
            for _ in range(times)
        )
        if not is_fixed:
            return PictureFrames(starts=None, lengths=lengths)
        device = self._frequencies.device
        starts, is_cuda = [0, *accumulate(lengths)], device.type == "cuda"
        sent = torch.tensor(starts, dtype=torch.int32, pin_memory=is_cuda)
        return PictureFrames(starts=sent.to(device, non_blocking=True), lengths=lengths)

    def _with_positions(self, hidden: Tensor, table: Tensor, layout: TowerLayout) -> Tensor:
        """Adds the positions of each picture's patches."""
        grids = layout.grids
        lengths = [prod(grid) for grid in grids]
        split = (each.split(lengths) for each in (hidden, *layout.places))
        parts = zip(*split, grids, strict=True)
        add = _FITS[self.shapes.table_fit]
        added = [
            add(patches, table, (row, column), grid[1:]) for patches, row, column, grid in parts
        ]
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


def _transformer(
    shapes: TowerShapes, names: TowerNames, scope: ModuleScope, merger_scope: ModuleScope
) -> TowerModules:
    """Returns the layers of a tower whose blocks all attend."""
    blocks = (
        TowerBlock(shapes, names, scope.under(names.block.format(index=index)))
        for index in range(shapes.depth)
    )
    return TowerModules(
        embedding=patch_embedding(shapes, names, scope),
        blocks=module_list(blocks),
        merger=Merger(shapes, names, scope, merger_scope),
    )
