"""Loading: every tensor finds its place, and files that don't fit are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import WeightsError
from milepost.models import LoadOptions, load_model, weights
from milepost.models.weights import WeightFiles
from tests.checkpoints import build, save

NAME = "model.layers.1.linear_attn.out_proj.weight"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def parameters(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(folder)[0].named_parameters())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def save_sharded(folder: Path) -> dict[str, str]:
    """Save in several files; returns the index's map of names."""
    build("qwen3_next").save_pretrained(folder, max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    return index


def test_shards_load_as_one_file(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path / "one")
    save_sharded(tmp_path / "many")
    assert_same(parameters(tmp_path / "one"), parameters(tmp_path / "many"))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_joint", "qwen3_5_moe"])
def test_fused_experts_load_as_single_ones(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    expected = parameters(tmp_path)

    def exchange(tensors: dict[str, Tensor]) -> None:
        for prefix in {key.split("experts.")[0] for key in tensors if ".experts." in key}:
            parts = [
                torch.stack([tensors.pop(f"{prefix}experts.{i}.{part}.weight") for i in range(6)])
                for part in ("gate_proj", "up_proj", "down_proj")
            ]
            tensors[f"{prefix}experts.gate_up_proj"] = torch.cat(parts[:2], 1)
            tensors[f"{prefix}experts.down_proj"] = parts[2]

    if any("experts.0." in key for key in WeightFiles(tmp_path).by_name):
        edit(tmp_path, exchange)
    assert any(key.endswith("experts.gate_up_proj") for key in WeightFiles(tmp_path).by_name)
    assert_same(parameters(tmp_path), expected)


def test_draft_layers_and_vision_are_skipped(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    expected = parameters(tmp_path)
    extra = {"mtp.fc.weight": torch.ones(2), "model.visual.merger.norm.weight": torch.ones(2)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    assert_same(parameters(tmp_path), expected)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    save("qwen3_5_tied", tmp_path)
    model, _ = load_model(tmp_path)
    assert model.lm_head.weights[0].values is model.embedding
    other = torch.ones_like(model.embedding)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    assert torch.equal(load_model(tmp_path)[0].lm_head.weights[0].values, other)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "auto"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    save("qwen3_5", tmp_path, torch.bfloat16)
    model, _ = load_model(tmp_path, LoadOptions(dtype=dtype))
    wanted = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    assert model.dtype == model.embedding.dtype == wanted
    assert model.layers[0].blocks[0].parts[0].decay_rate.dtype == (
        torch.float64 if dtype == "float64" else torch.float32
    )


def test_dummy_needs_no_weights_and_follows_the_seed(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (
        dict(
            load_model(tmp_path, LoadOptions(load_format="dummy", seed=seed))[0].named_parameters()
        )
        for seed in (3, 3, 4)
    )
    assert_same(first, again)
    assert not torch.equal(first["embedding"], other["embedding"])
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert (first["layers.0.blocks.0.parts.0.decay_rate"] < 0).all()


def refused(folder: Path, *words: str) -> None:
    """Loading fails with an error that holds all the words."""
    with pytest.raises(WeightsError) as failure:
        load_model(folder)
    for word in words:
        assert re.search(word, str(failure.value)), (word, str(failure.value))


def test_missing_tensor_is_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(NAME))
    refused(tmp_path, NAME, "missing")


def test_missing_expert_is_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    refused(tmp_path, name, "missing")


def test_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    name = "model.layers.0.linear_attn.in_proj_qkvz.bias"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    refused(tmp_path, "model.safetensors", name, "no place")


def test_wrong_shape_is_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({NAME: torch.ones(48, 71)}))
    refused(tmp_path, "model.safetensors", NAME, r"\[48, 71\]", r"\[48, 72\]")


def test_integers_are_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    whole = torch.ones(48, 72, dtype=torch.int8)
    edit(tmp_path, lambda tensors: tensors.update({NAME: whole}))
    refused(tmp_path, "model.safetensors", NAME, "I8")


@pytest.mark.parametrize("size", [0, 4, 1000, 100_000])
def test_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(tmp_path, "model.safetensors", "truncated")


def test_no_weights_are_refused(tmp_path: Path) -> None:
    save("qwen3_next", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, str(tmp_path), "safetensors")


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    index = save_sharded(tmp_path)
    (tmp_path / index[NAME]).unlink()
    refused(tmp_path, index[NAME], "missing")


def test_tensor_missing_from_its_shard_is_refused(tmp_path: Path) -> None:
    index = save_sharded(tmp_path)
    file = tmp_path / index[NAME]
    tensors = load_file(file)
    del tensors[NAME]
    save_file(tensors, file)
    refused(tmp_path, index[NAME], NAME)


def test_tensor_missing_from_the_index_is_refused(tmp_path: Path) -> None:
    index = save_sharded(tmp_path)
    file = tmp_path / index[NAME]
    save_file(load_file(file) | {"unnamed": torch.ones(1)}, file)
    refused(tmp_path, index[NAME], "unnamed")


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    index = save_sharded(tmp_path)
    file = tmp_path / next(file for file in set(index.values()) if file != index[NAME])
    save_file(load_file(file) | {NAME: torch.ones(48, 72)}, file)
    refused(tmp_path, NAME, "in two files")


def test_experts_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    save("qwen3_5_moe", tmp_path)
    prefix = "model.layers.0.mlp.experts"
    fused = {
        f"{prefix}.gate_up_proj": torch.ones(6, 40, 48),
        f"{prefix}.down_proj": torch.ones(6, 48, 20),
    }
    edit(tmp_path, lambda tensors: tensors.update(fused))
    refused(tmp_path, rf"{prefix}\.\d\.\w+_proj\.weight", "no place")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 200_000])
def test_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize(("least", "shows"), [(2**40, False), (100, True)])
def test_much_is_read_with_progress(least, shows, monkeypatch, capsys, tmp_path):
    save_sharded(tmp_path)
    monkeypatch.setattr(weights, "_SHOWN_BYTES", least)
    load_model(tmp_path)
    assert ("loading weights: 0.0 GiB in" in capsys.readouterr().err) is shows
