"""Weights of other forms than raw: layers and loading know nothing of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from milepost.errors import WeightsError
from milepost.kernels import norm
from milepost.layers.linear import Linear
from milepost.layers.parameters import ParameterKind
from milepost.layers.placements import Placements, place_scattered, place_whole, scale
from milepost.layers.weights import RAW, Raw
from milepost.models import load_config
from milepost.models.registry import find_architecture
from milepost.models.weights import WeightFiles, fill_from_files
from milepost.parallel import Cut
from tests.batches import Part, build_pools
from tests.checkpoints import save
from tests.numbers import relative_error

KIND = ParameterKind(dtype=torch.float32, device=torch.device("cpu"))


class Int8Weight(nn.Module):
    """Whole numbers, and a scale for each row."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.values = torch.zeros(num_outputs, num_inputs, dtype=torch.int8)
        self.scales = torch.full((num_outputs, 1), torch.nan)

    def multiply(self, hidden: Tensor, bias: Tensor | None, *, lets_next_start: bool) -> Tensor:  # noqa: ARG002
        return F.linear(hidden, self.values * self.scales, bias)

    def multiply_into(
        self, output: Tensor, hidden: Tensor, bias: Tensor | None, *, lets_next_start: bool
    ) -> None:
        output.copy_(self.multiply(hidden, bias, lets_next_start=lets_next_start))

    def multiply_beside(self, output: Tensor, hidden: Tensor, raw: Tensor) -> bool:  # noqa: ARG002
        return False

    def partials(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply(hidden, bias, lets_next_start=True)

    def multiply_gated(self, hidden: Tensor) -> Tensor:
        return norm.silu_mul(self.partials(hidden, None))

    def takes_gated(self, num_tokens: int) -> bool:  # noqa: ARG002
        return False

    def place(self, rows: Tensor, path: str) -> Placements:  # noqa: ARG002
        return {
            "weight": replace(place_scattered(self.values, rows), types=("I8",)),
            "weight_scale": place_scattered(self.scales, rows),
        }

    def pack(self) -> None:
        pass


@dataclass(frozen=True)
class Int8(Raw):
    """Experts stay raw."""

    def matrix(self, num_outputs: int, num_inputs: int, kind: ParameterKind) -> Int8Weight:  # noqa: ARG002
        return Int8Weight(num_outputs, num_inputs)


QUANTISED = ("q_proj", "k_proj", "v_proj", "in_proj_qkvz", "gate_proj", "up_proj")


def precision_of(path: str) -> Raw:
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


def logits(folder: Path, kind: ParameterKind) -> Tensor:
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


class BesideWeight(Int8Weight):
    """Notes the raw weights that it multiplies too."""

    def multiply_beside(self, output: Tensor, hidden: Tensor, raw: Tensor) -> bool:
        self.beside = raw
        output.copy_(hidden @ torch.cat((self.values * self.scales, raw)).T)
        return True


@dataclass(frozen=True)
class Beside(Raw):
    def matrix(self, num_outputs: int, num_inputs: int, kind: ParameterKind) -> BesideWeight:  # noqa: ARG002
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
    sections: str, bias: bool, is_beside: bool
) -> None:
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
    alone = [weight.multiply(hidden, None, lets_next_start=True) for weight in layer.weights]
    groups = {
        letter: list(part.split(2, 1))
        for letter, part in zip(dict.fromkeys(sections), alone, strict=True)
    }
    expected = torch.cat([groups[letter].pop(0) for letter in sections], 1)
    assert torch.allclose(layer(hidden), expected)
    assert any(hasattr(weight, "beside") for weight in layer.weights) == is_beside


@dataclass(frozen=True)
class Twin(Raw):
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
