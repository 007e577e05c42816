"""The MTP head: its formula, and that checkpoints whose head does not fit are refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import ConfigError, UnsupportedModelError, WeightsError
from milepost.models import Decoder, LoadOptions, load_model, room
from tests.batches import Part, Pools, build_pools
from tests.checkpoints import save
from tests.mtp import Formula, add_head
from tests.numbers import relative_error

NUM_DRAFTS = 3
PAGES = [3, 1, 5]


def drafted(model: Decoder, token_ids: Tensor, edges: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states of the tokens but the last, computed in chunks, and the logits of drafts behind
    them all."""
    pools = build_pools(model)
    seen = []
    for begin, end in pairwise(edges):
        part = Part(
            pages=PAGES, start=begin, length=end - begin, slot_in=1 if begin else 0, slot_out=1
        )
        ctx = pools.context([part], num_decodes=int(end - begin == 1 and begin > 0))
        seen.append(model(token_ids[begin:end], ctx))
    logits, token, before = [], token_ids[-1:], seen[-1][-1:]
    for index in range(NUM_DRAFTS):
        before = model.draft(token, before, _one_token(model, pools, len(token_ids) - 1 + index))
        logits.append(model.compute_logits(before))
        token = logits[-1].argmax(-1)
    return torch.cat(seen), torch.cat(logits)


def _one_token(model: Decoder, pools: Pools, position: int):
    """The context of a pass behind which drafts come."""
    own = replace(pools, operations=(model.mtp.attention.operation,))
    part = Part(pages=PAGES, start=position, length=1, slot_in=1, slot_out=1)
    return own.context([part], num_decodes=1)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("qwen3_next", False),
        ("qwen3_next", True),
        ("qwen3_next_dense", False),
        ("qwen3_next_joint", False),
        ("qwen3_5_tied", False),
        ("qwen3_5_moe", True),
        ("qwen3_5_multimodal", False),
        ("intern_s2_preview", False),
    ],
)
def test_drafts_are_those_of_the_formula(name: str, fused: bool, tmp_path: Path) -> None:
    save(name, tmp_path, torch.float64)
    add_head(tmp_path)
    formula = Formula(tmp_path)
    if fused:
        add_head(tmp_path, fused_experts=True)
    model, _ = load_model(tmp_path, LoadOptions(head="mtp"))
    token_ids = torch.randint(0, 101, (150,), generator=torch.Generator().manual_seed(1))
    hidden, logits = drafted(model, token_ids, [0, 64, 147, 148, 149])
    expected = formula.logits(token_ids, hidden, NUM_DRAFTS)
    assert relative_error(logits, expected) < 1e-7, "angles are float32"
    assert expected.std() > 0.3, "flat logits would show nothing"


def test_first_row_would_show(tmp_path: Path) -> None:
    """The row that has no hidden state before it is not attended to: else drafts are others."""
    save("qwen3_5", tmp_path, torch.float64)
    add_head(tmp_path)
    model, _ = load_model(tmp_path, LoadOptions(head="mtp"))
    token_ids = torch.arange(40)
    hidden, _ = drafted(model, token_ids, [0, 39])
    model.mtp.attention.shapes = replace(model.mtp.attention.shapes, first_row=0)
    del model.mtp.attention.operation
    _, logits = drafted(model, token_ids, [0, 39])
    expected = Formula(tmp_path).logits(token_ids, hidden, NUM_DRAFTS)
    assert relative_error(logits[:1], expected[:1]) > 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("qwen3_next", tmp_path)
    add_head(tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def configure(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def assert_refused(folder: Path, kind: type[Exception], words: str, caplog) -> None:
    """By name where the head is asked for; with `auto` there is one warning, and no head."""
    with pytest.raises(kind, match=words):
        load_model(folder, LoadOptions(head="mtp"))
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(folder, LoadOptions(head="auto"))
    assert model.mtp is None
    (record,) = caplog.records
    with pytest.raises(kind, match=words):
        raise kind(record.getMessage())
    load_model(folder)


OWN = "mtp.layers.0.mlp.experts.2.up_proj.weight"


def test_missing_tensor_is_refused(folder, caplog):
    edit(folder, lambda tensors: tensors.pop(OWN))
    assert_refused(folder, WeightsError, f"{OWN}.*missing", caplog)


def test_unmatched_tensor_is_refused(folder, caplog):
    edit(folder, lambda tensors: tensors.update({"mtp.fc.bias": torch.ones(48)}))
    assert_refused(folder, WeightsError, r"mtp\.fc\.bias.*no place", caplog)


def test_quantised_tensor_is_refused(folder, caplog):
    edit(folder, lambda tensors: tensors.update({OWN: tensors[OWN].to(torch.float8_e4m3fn)}))
    assert_refused(folder, WeightsError, f"{OWN}.*F8_E4M3.*use a checkpoint in", caplog)


def test_scales_of_a_quantised_head_are_refused(folder, caplog):
    scale = OWN.replace("weight", "weight_scale_inv")
    edit(folder, lambda tensors: tensors.update({scale: torch.ones(1, 1)}))
    assert_refused(folder, WeightsError, f"{scale}.*no place", caplog)


def test_tensor_of_another_shape_is_refused(folder, caplog):
    edit(folder, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(47)}))
    assert_refused(folder, WeightsError, r"mtp\.norm\.weight.*shape", caplog)


def test_checkpoint_without_a_head_is_refused(tmp_path, caplog):
    save("qwen3_5", tmp_path)
    assert_refused(tmp_path, WeightsError, r"mtp\..*missing", caplog)


def test_architecture_without_heads_is_refused(tmp_path, caplog):
    save("lfm2", tmp_path)
    assert_refused(tmp_path, UnsupportedModelError, "lfm2.*no MTP head", caplog)


@pytest.mark.parametrize("depth", [0, 2])
def test_depth_is_the_configurations(folder, caplog, depth):
    configure(folder, num_nextn_predict_layers=depth)
    assert_refused(folder, UnsupportedModelError, f"num_nextn_predict_layers={depth}.*is 1", caplog)


def test_embeddings_of_its_own_are_refused(folder, caplog):
    configure(folder, mtp_use_dedicated_embeddings=True)
    assert_refused(folder, UnsupportedModelError, "mtp_use_dedicated_embeddings", caplog)


def test_dummy_head_is_filled(tmp_path):
    save("qwen3_next", tmp_path)
    model, _ = load_model(tmp_path, LoadOptions(load_format="dummy", head="mtp"))
    assert all(tensor.isfinite().all() for tensor in model.mtp.parameters())
    assert model.mtp.fc.weights[0].values.std() > 0.1


def test_head_counts_as_weights_and_its_kv_as_a_layer(folder, monkeypatch):
    plain, _ = load_model(folder)
    model, _ = load_model(folder, LoadOptions(head="mtp"))
    own = sum(parameter.nbytes for parameter in model.mtp.parameters())
    assert model.num_bytes == plain.num_bytes + own
    assert len(model.layer_specs) > len(plain.layer_specs)
    monkeypatch.setattr(room, "available_bytes", lambda _device: plain.num_bytes)
    load_model(folder)
    with pytest.raises(ConfigError, match="are missing"):
        load_model(folder, LoadOptions(head="mtp"))
