"""Two models never share a key, and one has the same keys in every process."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from milepost.models.identity import identify

FACTS = {"dtype": "float32", "page_size": 64}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "a")


def write(folder, *, value=1.0, name="w", config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"layers": 2}))
    weights = torch.zeros(64, 64)
    weights[-1, -1] = value
    save_file({name: weights}, folder / "model.safetensors")
    return folder


def test_a_copy_is_the_same_model(folder, tmp_path):
    one = identify(folder, has_weights=True, facts=FACTS)
    assert one == identify(write(tmp_path / "b"), has_weights=True, facts=dict(FACTS))
    assert len(one) == 16


@pytest.mark.parametrize(
    "change", [{"value": 2.0}, {"name": "v"}, {"config": {"layers": 3}}], ids=lambda c: min(c)
)
def test_other_weights_names_or_configuration_are_another(folder, tmp_path, change):
    other = write(tmp_path / "b", **change)
    assert identify(folder, has_weights=True, facts=FACTS) != identify(
        other, has_weights=True, facts=FACTS
    )


NAMES = [f"layers.{i}.{kind}" for i in range(8) for kind in ("q", "experts.0.w", "experts.1.w")]


@pytest.mark.parametrize("name", [name for name in NAMES if "experts.1" not in name])
def test_one_tensor_that_was_trained_further_makes_another_model(folder, tmp_path, name):
    """Wherever it lies in its file, between others that are larger."""
    tensors = {each: torch.zeros(64, 64 if "experts" in each else 3) for each in [*NAMES, "z"]}
    found = []
    for value in (0.0, 1.0):
        tensors[name] = torch.full_like(tensors[name], value)
        save_file(tensors, folder / "model.safetensors")
        found.append(identify(folder, has_weights=True, facts=FACTS))
    assert found[0] != found[1]


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"page_size": 16}, {"seed": 3}])
def test_run_in_another_way_it_is_another(folder, change):
    assert identify(folder, has_weights=True, facts=FACTS) != identify(
        folder, has_weights=True, facts=FACTS | change
    )


def test_what_is_no_file_of_weights_may_lie_there(folder):
    one = identify(folder, has_weights=True, facts=FACTS)
    (folder / "z.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert identify(folder, has_weights=True, facts=FACTS) != one


def test_dummy_weights_need_no_files(folder):
    (folder / "model.safetensors").unlink()
    assert identify(folder, has_weights=False, facts=FACTS)
