"""Weights of other forms than raw: layers and loading know nothing of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from milepost.errors import WeightsError
from milepost.kernels import products
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import WeightSlots, place_scattered, place_whole, scale
from milepost.layers.weights import RAW, RawPrecision
from milepost.models import load_config
from milepost.models.registry import find_architecture
from milepost.models.weights import WeightFiles, fill_from_files
from milepost.parallel import Cut
from tests.batches import Part, build_pools
from tests.checkpoints import save
from tests.numbers import relative_error

KIND = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))


class Int8Weight(nn.Module):
    """Whole numbers, and a scale for each row."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.values = torch.zeros(num_outputs, num_inputs, dtype=torch.int8)
        self.scales = torch.full((num_outputs, 1), torch.nan)

    @property
    def form(self) -> products.Raw:
        return products.Raw(values=self.values * self.scales)

    def place(self, rows: Tensor, path: str) -> WeightSlots:  # noqa: ARG002
        return {
            "weight": replace(place_scattered(self.values, rows), types=("I8",)),
            "weight_scale": place_scattered(self.scales, rows),
        }

    def pack(self) -> None:
        pass


@dataclass(frozen=True)
class Int8(RawPrecision):
    """Experts stay raw."""

    def matrix(self, num_outputs: int, num_inputs: int, kind: ModuleScope) -> Int8Weight:  # noqa: ARG002
        return Int8Weight(num_outputs, num_inputs)


QUANTISED = ("q_proj", "k_proj", "v_proj", "in_proj_qkvz", "gate_proj", "up_proj")


def precision_of(path: str) -> RawPrecision:
    return Int8() if path.rpartition(".")[2] in QUANTISED else RAW


def quantise(folder: Path) -> None:
    """The checkpoint's projections by these names, and the values that they stand for next door."""
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if name.split(".")[-2] in QUANTISED and "experts" not in name:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            stored[name] = (tensor / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            meant[name] = stored[name] * scale
    save_file(meant, folder / "meant.safetensors")
    save_file(stored, folder / "model.safetensors")


def logits(folder: Path, kind: ModuleScope) -> Tensor:
    text, files = load_config(folder), WeightFiles(folder)
    architecture = find_architecture(text.model_type)
    model = architecture.decoder(text, replace(kind, names=files.by_name), is_tied=False)
    fill_from_files(model, files, architecture.skipped)
    part = Part(pages=[3, 1], start=0, length=70, slot_in=0, slot_out=1)
    tokens = torch.arange(70) % 11
    return model.compute_logits(model(tokens, build_pools(model).context([part])))


def test_a_quantised_checkpoint_answers_as_the_values_that_it_stands_for(tmp_path: Path) -> None:
    """With its own order of rows, and with one projection of a layer left as it was."""
    save("qwen3_next_dense", tmp_path)
    quantise(tmp_path)
    found = logits(tmp_path, replace(KIND, precision_of=precision_of))
    (tmp_path / "meant.safetensors").rename(tmp_path / "model.safetensors")
    assert relative_error(found, logits(tmp_path, KIND)) < 1e-5


@pytest.mark.parametrize("tensor", ["weight", "weight_scale"])
def test_a_missing_tensor_of_a_quantised_projection_is_named(tensor: str, tmp_path: Path) -> None:
    save("qwen3_next_dense", tmp_path)
    quantise(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.linear_attn.in_proj_qkvz.{tensor}"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name}' is missing"):
        logits(tmp_path, replace(KIND, precision_of=precision_of))


@pytest.mark.parametrize(
    ("quantised", "sizes"), [("", [10]), ("abc", [10]), ("b", [8, 2]), ("a", [4, 6])]
)
def test_projections_share_a_matrix_if_their_precision_is_equal(
    quantised: str, sizes: list[int]
) -> None:
    kind = replace(KIND, precision_of=lambda path: Int8() if path in quantised else RAW)
    layer = Linear(5, (("a", 3), ("b", 2), ("a", 1), ("c", 4)), kind)
    assert [len(weight.values) for weight in layer.weights] == sizes


def test_outputs_stand_in_the_sections_order_whatever_holds_them() -> None:
    sections = (("a", 3), ("b", 2), ("a", 1))
    orders = {"a": torch.tensor([3, 0, 1, 2])}
    rows = {"a": torch.randn(4, 5), "b": torch.randn(2, 5), "bias": torch.randn(6)}
    outputs = []
    for other in (RAW, Twin()):
        kind = replace(KIND, precision_of=lambda path, other=other: other if path == "b" else RAW)
        layer = Linear(5, sections, kind, bias=True, orders=orders)
        places = layer.placements()
        assert list(places) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        for name in "ab":
            places[f"{name}.weight"].store(rows[name])
            places[f"{name}.bias"].store(rows["bias"][: len(rows[name])])
        outputs.append(layer(torch.eye(5)))
    # The checkpoint's first row of `a` is the last of its outputs.
    expected = torch.cat((rows["a"][1:], rows["b"], rows["a"][:1])).T
    biases = torch.cat((rows["bias"][1:4], rows["bias"][:2], rows["bias"][:1]))
    for found in outputs:
        assert torch.allclose(found, expected + biases)


class OwnForm(products.Packed):
    """Multiplies by itself."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, self.values, bias)


class BesideWeight(Int8Weight):
    """Of a form that is not raw."""

    @property
    def form(self) -> products.Packed:
        values = self.values * self.scales
        return OwnForm(values=values, num_outputs=len(values), num_inputs=values.shape[1])


@dataclass(frozen=True)
class Beside(RawPrecision):
    def matrix(self, num_outputs: int, num_inputs: int, kind: ModuleScope) -> BesideWeight:  # noqa: ARG002
        return BesideWeight(num_outputs, num_inputs)


@pytest.mark.parametrize(
    ("sections", "bias", "is_beside"),
    [
        ("qqrr", False, True),
        ("qqr", True, False),
        ("qrq", False, False),
        ("rq", False, False),
        ("qir", False, False),
    ],
)
def test_raw_weights_are_multiplied_beside_others_that_they_stand_behind(
    monkeypatch, sections: str, bias: bool, is_beside: bool
) -> None:
    found, multiply_beside = [], products.multiply_beside

    def note(*given: Any, **how: Any) -> None:
        found.append(given)
        multiply_beside(*given, **how)

    monkeypatch.setattr(products, "multiply_beside", note)
    precisions = {"q": Beside(), "i": Int8(), "r": RAW}
    kind = replace(KIND, precision_of=lambda path: precisions[path[0]])
    names = [(f"{letter}{number}", 2) for number, letter in enumerate(sections)]
    layer = Linear(5, names, kind, bias=bias)
    for weight in layer.weights:
        weight.values.data.copy_(torch.randint(-9, 9, weight.values.shape))
        if isinstance(weight, Int8Weight):
            weight.scales.fill_(0.5)
    for values in layer.biases or ():
        values.data.zero_()
    hidden = torch.randn(3, 5)
    alone = [products.multiply(hidden, weight.form) for weight in layer.weights]
    groups = {
        letter: list(part.split(2, 1))
        for letter, part in zip(dict.fromkeys(sections), alone, strict=True)
    }
    expected = torch.cat([groups[letter].pop(0) for letter in sections], 1)
    assert torch.allclose(layer(hidden), expected)
    assert bool(found) == is_beside


@dataclass(frozen=True)
class Twin(RawPrecision):
    """Raw, and yet of another precision."""


def test_a_shard_reads_its_own_part(tmp_path: Path) -> None:
    whole, hidden = torch.randn(3, 8), torch.randn(2, 8)
    save_file({"out.weight": whole}, tmp_path / "model.safetensors")
    found = torch.zeros(2, 3)
    for rank in (0, 1):
        layer = Linear(4, (("out", 3),), KIND, inputs=Cut(8, ((4 * rank, 4),)))
        WeightFiles(tmp_path).read_into(layer.placements())
        found += layer(hidden[:, 4 * rank : 4 * rank + 4])
    assert relative_error(found, hidden @ whole.T) < 1e-6


def test_a_factor_goes_where_the_tensor_is() -> None:
    """Tensors may come from files by way of the device."""
    there = torch.empty(4, device="meta")
    scale(place_whole(there), torch.ones(4)).store(torch.empty(4, device="meta"))
