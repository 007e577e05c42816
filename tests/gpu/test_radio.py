"""Nemotron's vision tower on a GPU at its real shapes, with fewer layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milepost.images import normalisation
from milepost.images.tiles import prepare_tiles
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower import Tower
from milepost.models.radio import radio_tower
from milepost.runner.measuring import measure_tower
from milepost.runner.pictures import EncodedPictures
from tests.gpu.test_vision import encode, filled
from tests.images.pictures import picture
from tests.images.test_floating import SETTINGS
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WHOLE = SimpleNamespace(
    vision_config=SimpleNamespace(
        model_type="radio",
        hidden_size=1280,
        num_hidden_layers=3,
        num_attention_heads=16,
        patch_size=16,
        num_channels=3,
        max_img_size=2048,
        num_cls_tokens=3,
        num_registers=7,
        hidden_act="gelu",
        use_swiglu_ffn=False,
        qkv_bias=True,
        mlp_ratio=4.0,
        layer_norm_eps=1e-6,
    ),
    downsample_ratio=0.5,
    vision_hidden_size=1280,
    projector_hidden_size=4096,
    get_text_config=lambda: SimpleNamespace(hidden_size=2688, num_nextn_predict_layers=1),
)
SIZES = [(300, 420), (64, 2000), (256, 256)]


def tower(dtype: torch.dtype, device: str) -> Tower:
    return filled(radio_tower(WHOLE, ModuleScope(dtype=dtype, device=torch.device(device))))


def test_embeddings_are_close_to_the_reference_and_the_same_beside_others() -> None:
    own, exact = tower(torch.bfloat16, "cuda"), tower(torch.float64, "cpu")
    table = torch.from_numpy(normalisation(SETTINGS))
    images = [prepare_tiles(picture(*size), SETTINGS)[0].image for size in SIZES]
    rows = [torch.from_numpy(each.rows) for each in images]
    alone = []
    for image, each in zip(images, rows, strict=True):
        expected = exact(each, table.double(), [image.grid])
        for is_fixed in (False, True):
            found = own(each.cuda(), table.cuda().bfloat16(), [image.grid], is_fixed=is_fixed)
            assert relative_error(found.cpu(), expected) < 2e-2
        alone.append(found)
    grids = [each.grid for each in images]
    together = own(torch.cat(rows).cuda(), table.cuda().bfloat16(), grids, is_fixed=True)
    assert torch.equal(together, torch.cat(alone))


def test_graphs_have_the_bits_of_launches() -> None:
    own = tower(torch.bfloat16, "cuda")
    most = measure_tower(own, SETTINGS, captures=True).tower_graphs
    plain, graphed = (EncodedPictures(own, SETTINGS) for _ in range(2))
    graphed.capture(most)
    for turn in range(3):
        for size in SIZES:
            images = [prepare_tiles(picture(*size, turn), SETTINGS)[0].image]
            assert torch.equal(encode(graphed, images), encode(plain, images))
    assert graphed._graphs.num_bytes <= most
