"""Two models never share a key, and one has the same keys in every process."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from milepost.errors import WeightsError
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


def put(file, header, data=b"x" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(*offsets):
    return {"a": {"dtype": "U8", "shape": [64], "data_offsets": list(offsets)}}


BROKEN = {
    "a list": [],
    "no offsets": {"a": {"dtype": "U8", "shape": [64]}},
    "no entry": {"a": 3},
    "negative": entry(-900, 64),
    "text": entry("0", "64"),
    "reversed": entry(60, 2),
    "huge": entry(2**70, 2**71),
    "beyond the end": entry(0, 65),
    "no number": entry(float("nan"), 64),
    "deep": b"[" * 200_000,
    "deep beside": json.dumps(entry(0, 64)).encode()[:-2] + b',"b":' + b"[" * 200_000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("header", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_that_is_not_loaded_changes_nothing(folder, header):
    one = identify(folder, has_weights=True, facts=FACTS)
    put(folder / "stray.safetensors", header)
    (folder / "empty.safetensors").touch()
    (folder / "folder.safetensors").mkdir()
    assert identify(folder, has_weights=True, facts=FACTS) == one


@pytest.mark.parametrize("header", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_that_is_loaded_is_named_with_the_reason(folder, header):
    index = {"weight_map": {"a": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    put(folder / "part.safetensors", header)
    with pytest.raises(WeightsError, match=r"part\.safetensors: cannot be read, .*header"):
        identify(folder, has_weights=True, facts=FACTS)


def test_tensors_of_types_that_no_model_loads_may_be_in_a_file(folder):
    put(folder / "model.safetensors", {"a": entry(0, 64)["a"] | {"dtype": "F8_E8M0"}})
    assert identify(folder, has_weights=True, facts=FACTS)


def test_identities_stay_what_they_were(tmp_path):
    """What lies in a directory of a cache is found by them."""
    (tmp_path / "config.json").write_text("{}")
    put(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, **entry(0, 64)})
    found = identify(tmp_path, has_weights=True, facts=FACTS)
    assert found.hex() == "5f8c21c8c044f4580e60a44e7b0ee500"


def test_dummy_weights_need_no_files(folder):
    (folder / "model.safetensors").unlink()
    assert identify(folder, has_weights=False, facts=FACTS)
