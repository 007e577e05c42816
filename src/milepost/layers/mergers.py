"""The end of a vision tower: patches are merged into tokens of the model's hidden size.

Legend: P patches of all pictures, D hidden size, M patches merged into a token, C hidden size of
the model.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels.layout.emit import values_of
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower_parts import (
    LayerNorm,
    TowerLinear,
    TowerNames,
    TowerRun,
    TowerShapes,
    by_rows,
    fixed_norm,
)


class TowerEnd(Protocol):
    """Turns M patches into a token. It is also a module."""

    def end(self, run: TowerRun) -> Tensor:
        """Returns the tokens [P / M, C] of a run that has passed all blocks."""
        ...


_MERGED_EPS = 1e-5


class Merger(nn.Module):
    """Two projections with a GELU in between, after a norm over each patch, and perhaps one over
    the merged patches."""

    def __init__(
        self, shapes: TowerShapes, names: TowerNames, scope: ModuleScope, merger_scope: ModuleScope
    ) -> None:
        super().__init__()
        self._size = shapes.hidden_size * shapes.merge_size**2
        inner = shapes.merger_size or self._size
        self.norm = LayerNorm(shapes.hidden_size, shapes.eps, scope.under(names.norm))
        self.merged_norm = None
        if names.merged_norm is not None:
            self.merged_norm = LayerNorm(
                self._size, _MERGED_EPS, merger_scope.under(names.merged_norm)
            )
        first, second = map(merger_scope.under, names.merger)
        self.first = TowerLinear(first, inner, self._size)
        self.second = TowerLinear(second, shapes.output_size, inner)

    def end(self, run: TowerRun) -> Tensor:
        """Returns the tokens of a run that has passed all blocks."""
        normed = self.norm.add(run.hidden, run.delta)[1]
        merged = normed.view(-1, self._size)
        if self.merged_norm is not None:
            merged = self.merged_norm.add(merged, None)[1]
        is_fixed = run.layout.is_fixed
        inner = by_rows(F.gelu, self.first(merged, is_fixed=is_fixed), is_fixed=is_fixed)
        tokens: Tensor = self.second(inner, is_fixed=is_fixed)
        return tokens


class SquaredMerger(nn.Module):
    """Two projections without biases and a squared ReLU in between, after a root mean square norm
    over the merged patches. With `patch_norm` each patch is normed before that."""

    def __init__(
        self,
        shapes: TowerShapes,
        names: tuple[str, str, str],
        scope: ModuleScope,
        patch_norm: LayerNorm | None,
    ) -> None:
        super().__init__()
        self._size = shapes.hidden_size * shapes.merge_size**2
        self.patch_norm = patch_norm
        norm, first, second = map(scope.under, names)
        self.norm = fixed_norm(self._size, _MERGED_EPS, norm)
        inner = shapes.merger_size or self._size
        self.first = TowerLinear(first, inner, self._size, has_bias=False)
        self.second = TowerLinear(second, shapes.output_size, inner, has_bias=False)

    def end(self, run: TowerRun) -> Tensor:
        """Returns the tokens of a run that has passed all blocks."""
        hidden = run.hidden if run.delta is None else run.hidden + run.delta
        if self.patch_norm is not None:
            hidden = self.patch_norm.add(hidden, None)[1]
        normed = values_of(self.norm.add(hidden.view(-1, self._size), None)[1])
        is_fixed = run.layout.is_fixed
        units = self.first(normed, is_fixed=is_fixed).relu().square()
        tokens: Tensor = self.second(units, is_fixed=is_fixed)
        return tokens
