"""LFM3-VL's vision tower on a GPU, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from milepost.images import ImageSettings, normalisation, prepare
from milepost.layers.grid_tower import GridBlock, GridBlockShapes, NormedEmbedding
from milepost.layers.mergers import Merger
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower import Tower, TowerModules
from milepost.layers.tower_parts import TowerNames
from tests.gpu.test_vision import filled, shapes_of
from tests.images.pictures import picture
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def grid_tower(dtype: torch.dtype, device: str) -> Tower:
    """LFM3-VL's, whose blocks convolve or attend."""
    kind = ModuleScope(dtype=dtype, device=torch.device(device))
    shapes = replace(shapes_of("small"), num_positions=0, merger_size=4096, is_gated=True)
    own = GridBlockShapes(num_kv_heads=6, conv_width=3, eps=1e-5)
    names = TowerNames(norm="layer_norm", merger=("linear_1", "linear_2"))
    modules = TowerModules(
        embedding=NormedEmbedding(shapes, own.eps, kind),
        blocks=nn.ModuleList(
            GridBlock(shapes, own, mixer, kind) for mixer in ("conv", "full_attention", "conv")
        ),
        merger=Merger(shapes, names, kind, kind),
    )
    return filled(Tower(shapes, kind, names, modules=modules))


def test_embeddings_of_a_grid_tower_are_close_to_the_reference_and_alike_together() -> None:
    table = torch.from_numpy(normalisation(ImageSettings()))
    own, exact = grid_tower(torch.bfloat16, "cuda"), grid_tower(torch.float64, "cpu")
    images = [prepare(picture(*size), ImageSettings()) for size in ((300, 420), (256, 512))]
    given = [torch.from_numpy(each.rows) for each in images]
    alone = []
    for each, rows in zip(images, given, strict=True):
        expected = exact(rows, table.double(), [each.grid])
        for is_fixed in (False, True):
            how = rows.cuda(), table.cuda().bfloat16(), [each.grid]
            found = own(*how, is_fixed=is_fixed)
            assert relative_error(found.cpu(), expected) < 2e-2
        alone.append(found)
    grids = [each.grid for each in images]
    both = own(torch.cat(given).cuda(), table.cuda().bfloat16(), grids, is_fixed=True)
    assert torch.equal(both, torch.cat(alone))
