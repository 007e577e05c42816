"""Quantised checkpoints: each published layout is read as the values that it means, what is left
raw stays raw, and what is broken or not supported is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import ConfigError, UnsupportedModelError, WeightsError
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Packed
from milepost.layers.experts import USUAL_NAMES, ExpertNames, Experts, ExpertSizes
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ModuleScope
from milepost.layers.quantised import Fp4Precision, Fp8Precision, Int4Precision
from milepost.layers.quantised.eight_bits import Fp8Matrix
from milepost.layers.quantised.fp4 import Fp4Matrix
from milepost.layers.weight_slots import Rows
from milepost.layers.weights import RAW, RawExperts, RawPrecision, RawWeight
from milepost.models import load_config
from milepost.models.loading import LoadOptions, load_model
from milepost.models.quantization import has_fp8_kv, read_quantization
from milepost.models.registry import find_architecture
from milepost.models.weights import WeightFiles, fill_from_files
from milepost.parallel import Cut
from tests.batches import Part, build_pools
from tests.kernels.quantised_cases import make_int4
from tests.models.test_mtp import drafted
from tests.numbers import relative_error
from tests.quantised import EXPERTS, FORMATS, MIXED, VARIANTS, nvfp4, write

TOKENS = torch.arange(70) % 11
PART = Part(pages=[3, 1], start=0, length=70, slot_in=0, slot_out=1)
QKV = "model.layers.0.linear_attn.in_proj_qkv"
_PACKED = Int4Precision(layout="packed", group=32, is_symmetric=True)


def logits(model: Any) -> Tensor:
    return model.compute_logits(model(TOKENS, build_pools(model).context([PART])))


def round_to_integers(hidden: Tensor, scale: float | None) -> Tensor:
    """To int8 and back, as compressed-tensors' `fake_quantize` does it, but with a token's largest
    number at 127; or with a scale that is given."""
    rows = hidden.reshape(len(hidden), -1).float()
    own = rows.abs().amax(1, keepdim=True) / 127 if scale is None else torch.tensor(scale)
    numbers = rows * (1 / own.clamp(min=1e-12)) if scale is None else rows / own
    return (numbers.clamp(-128, 127).round().double() * own.double()).to(hidden.dtype)


def round_inputs(hidden: Tensor, depth: int | None, scale: float | None) -> Tensor:
    """To float8 and back, with a scale for `depth` inputs each or one that is given."""
    rows = hidden.reshape(len(hidden), -1).float()
    blocks = rows.split(depth or rows.shape[1], 1)
    rounded = []
    for block in blocks:
        own = block.abs().amax(1, keepdim=True) / 448 if scale is None else scale
        own = own.clamp(min=1e-12) if scale is None else own
        rounded.append((block / own).clamp(-448, 448).to(torch.float8_e4m3fn).float() * own)
    return torch.cat(rounded, 1).to(hidden.dtype)


@dataclass(frozen=True)
class Rounding(RawPrecision):
    """Raw weights, and activations as the quantised ones have them."""

    depth: int | None = None
    scale: float | None = None
    is_integer: bool = False

    def round(self, hidden: Tensor) -> Tensor:
        if self.is_integer:
            return round_to_integers(hidden, self.scale)
        return round_inputs(hidden, self.depth, self.scale)

    def matrix(self, num_outputs: int, num_inputs: int, kind: ModuleScope) -> RawWeight:
        return RoundingWeight(kind.empty(num_outputs, num_inputs), self)

    def experts(self, sizes: ExpertSizes, names: ExpertNames, kind: ModuleScope) -> Experts:
        made = RAW.experts(sizes, names, kind)
        return RoundingExperts(self, sizes, names, kind, made.up, made.down)


class RoundingWeight(RawWeight):
    def __init__(self, values: torch.nn.Parameter, rounding: Rounding) -> None:
        super().__init__(values)
        self.rounding = rounding

    @property
    def form(self) -> Packed:
        return RoundingForm(
            values=self.values,
            num_outputs=self.values.shape[0],
            num_inputs=self.values.shape[1],
            rounding=self.rounding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingForm(Packed):
    rounding: Rounding

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self.rounding.round(rows), self.values, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingStack:
    """Matrices of experts [X, O, I], which the reference multiplies as it does quantised ones."""

    values: Tensor
    rounding: Rounding
    order: SumOrder = SumOrder.FREE

    @property
    def scales(self) -> Tensor:
        return self.values

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[-1]

    def round_inputs(self, hidden: Tensor) -> Tensor:
        return self.rounding.round(hidden)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


class RoundingExperts(RawExperts):
    def __init__(self, rounding: Rounding, *given: Any) -> None:
        super().__init__(*given)
        self.rounding = rounding

    @property
    def forms(self) -> tuple[RoundingStack, RoundingStack]:
        up, down = (
            RoundingStack(values=each.values, rounding=self.rounding)
            for each in (self.up, self.down)
        )
        return up, down


def load_meant(
    folder: Path, stored: Path, rounding: RawPrecision, *, has_head: bool = False
) -> Any:
    """The raw checkpoint, with activations rounded where the stored one is quantised."""
    config, files = load_config(folder), WeightFiles(folder)
    settings = json.loads((stored / "config.json").read_text())["quantization_config"]
    forms = read_quantization(settings, WeightFiles(stored).by_name, has_files=True)
    kind = ModuleScope(
        dtype=torch.float64,
        device=torch.device("cpu"),
        names=files.by_name,
        precision_of=lambda path: (
            rounding if isinstance(forms.precision_of(path), Fp8Precision) else RawPrecision()
        ),
    )
    architecture = find_architecture(config.model_type)
    text = config.get_text_config()
    is_tied = "lm_head.weight" not in files.by_name
    model = architecture.decoder(text, kind, is_tied=is_tied, has_head=has_head)
    fill_from_files(model, files, (*architecture.skipped, re.escape(architecture.tower_path)))
    return model


ROUNDINGS = {
    "fp8-blocks": Rounding(128),
    "fp8-channels": Rounding(),
    "fp8-tensors": Rounding(None, 0.02),
    "modelopt": Rounding(None, 0.02),
    "int8-channels": Rounding(is_integer=True),
    "int8-tensors": Rounding(scale=0.02, is_integer=True),
}
NEMOTRON: dict[str, Any] = {
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_head_dim": 64,
}
"""Also `kv_b_proj`, which is multiplied raw, is quantised."""
LING: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
GRANITE: dict[str, Any] = {
    "intermediate_size": 64,
    "mamba_d_state": 32,
    "mamba_n_heads": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
}
"""Its experts are stacked, with scales that are too; or stand one by one, by other names."""
CASES = [
    ("qwen3_next", "fp8-blocks", EXPERTS),
    ("qwen3_5_moe", "fp8-blocks", EXPERTS | {"linear_key_head_dim": 64, "hidden_size": 256}),
    ("intern_s2_preview", "fp8-blocks", EXPERTS | {"linear_key_head_dim": 64, "hidden_size": 256}),
    ("minicpmv4_6", "packed", {}),
    ("qwen3_5", "fp8-channels", {}),
    ("qwen3_5", "int8-channels", {}),
    ("qwen3_next", "int8-channels", EXPERTS),
    ("nemotron_h", "int8-channels", NEMOTRON),
    ("kimi_linear", "int8-channels", KIMI),
    ("granitemoehybrid", "int8-channels", GRANITE),
    ("qwen3_5_moe", "fp8-tensors", EXPERTS),
    ("qwen3_next", "awq", EXPERTS),
    ("qwen3_5", "modelopt", {}),
    ("qwen3_5", "auto-round", {}),
    ("qwen3_next", "nvfp4", EXPERTS),
    ("qwen3_5", "mxfp4", {}),
    ("qwen3_5_moe", "mxfp4", EXPERTS),
    ("qwen3_5", "modelopt-nvfp4", {}),
    ("nemotron_h", "modelopt-nvfp4", NEMOTRON),
    ("kimi_linear", "nvfp4", KIMI),
    ("qwen3_5_moe", "gptq", EXPERTS),
    (
        "qwen3_5_moe",
        "packed",
        EXPERTS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
    ("qwen3_5", "packed-asymmetric", {"intermediate_size": 256}),
    ("nemotron_h", "modelopt", NEMOTRON),
    ("nemotron_h", "fp8-blocks", NEMOTRON),
    ("granitemoehybrid", "fp8-channels", GRANITE),
    ("granitemoehybrid", "fp8-channels", GRANITE | {"shared_intermediate_size": 96}),
    ("granitemoehybrid_as_built", "nvfp4", GRANITE),
    ("granitemoehybrid", "nvfp4", GRANITE | {"num_local_experts": 0}),
    ("kimi_linear", "fp8-blocks", KIMI),
    ("kimi_linear", "packed", KIMI),
    ("bailing_hybrid", "fp8-blocks", LING),
    ("bailing_hybrid", "packed", LING),
    ("bailing_hybrid_tiny", "fp8-channels", LING | {"q_lora_rank": 64}),
]


@pytest.mark.parametrize(("name", "form", "sizes"), CASES, ids=lambda each: str(each)[:20])
def test_a_checkpoint_answers_as_the_values_that_it_means(
    name: str, form: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    # In float64, where rounding differences seldom put an activation on the other side of a bound.
    stored, meant = write(name, tmp_path, form, **sizes)
    model, _ = load_model(stored, LoadOptions(dtype="float64"))
    expected = logits(load_meant(meant, stored, ROUNDINGS.get(form, RawPrecision())))
    assert relative_error(logits(model), expected) < 1e-4
    raw_bytes = load_model(meant, LoadOptions(dtype="float64"))[0].num_bytes
    assert model.num_bytes < 0.5 * raw_bytes, "they are kept quantised"


@pytest.mark.parametrize("form", VARIANTS)
def test_groups_zero_points_and_versions_are_read(form: str, tmp_path: Path) -> None:
    """Of dense layers and of experts, whose projections are read one by one."""
    sizes = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    stored, meant = write("qwen3_5_moe", tmp_path, form, **(EXPERTS | sizes))
    model, _ = load_model(stored, LoadOptions(dtype="float64"))
    rounding = Rounding(128) if form.startswith("fp8") else ROUNDINGS.get(form, RawPrecision())
    assert relative_error(logits(model), logits(load_meant(meant, stored, rounding))) < 1e-4


@pytest.mark.parametrize("form", MIXED)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_precisions_may_be_mixed(name: str, form: str, tmp_path: Path) -> None:
    """Tensors tell them; without files the configuration does, and says the same."""
    stored, meant = write(name, tmp_path, form, **(EXPERTS if "moe" in name else {}))
    model, _ = load_model(stored, LoadOptions(dtype="float64"))
    rounding = Rounding(None, 0.02) if form == "modelopt-mixed" else Rounding()
    assert relative_error(logits(model), logits(load_meant(meant, stored, rounding))) < 1e-4
    forms = [module for module in model.modules() if isinstance(module, Fp4Matrix | Fp8Matrix)]
    assert {type(each) for each in forms} == {Fp4Matrix, Fp8Matrix}
    dummy, _ = load_model(stored, LoadOptions(dtype="float64", load_format="dummy"))
    expected = [type(each) for each in model.modules()]
    assert [type(each) for each in dummy.modules()] == expected
    has_four_bits = not isinstance(model.lm_head.weights[0], RawWeight)
    assert has_four_bits == (form == "modelopt-mixed")


def test_a_quantised_head_is_one_also_where_the_configuration_says_tied(tmp_path: Path) -> None:
    stored, meant = write("qwen3_5", tmp_path, "nvfp4")
    tensors, raw = (load_file(each / "model.safetensors") for each in (stored, meant))
    own, raw["lm_head.weight"] = nvfp4(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{name}": each.contiguous() for name, each in own.items()}
    for folder, each in ((stored, tensors), (meant, raw)):
        save_file(each, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert relative_error(logits(load_model(stored)[0]), logits(load_model(meant)[0])) < 1e-4


@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        ("nemotron_h", "modelopt-nvfp4", 80),
        ("nemotron_h", "modelopt", 72),
        ("nemotron_h", "fp8-blocks", 136),
        ("qwen3_5_moe", "int8-channels", 80),
        ("qwen3_5_moe", "awq", 96),
        ("qwen3_5_moe", "packed-channels", 48),
    ],
)
def test_experts_of_any_size_are_whole_blocks(
    name: str, form: str, size: int, tmp_path: Path
) -> None:
    """As kernels take them, Nemotron-3-Nano's with 1856 units too; what is added changes nothing,
    of dummies neither."""
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": 128}
    own = (NEMOTRON if name == "nemotron_h" else EXPERTS) | sizes
    stored, meant = write(name, tmp_path, form, **own)
    model, _ = load_model(stored, LoadOptions(dtype="float64"))
    rounding = ROUNDINGS.get(form, RawPrecision())
    assert relative_error(logits(model), logits(load_meant(meant, stored, rounding))) < 1e-4
    dummy, _ = load_model(stored, LoadOptions(dtype="float64", load_format="dummy"))
    experts = [
        each
        for each in dummy.modules()
        if isinstance(each, Experts) and not isinstance(each, RawExperts)
    ]
    assert experts
    for each in experts:
        assert each.down.form.num_inputs == -(-size // 128) * 128
        ups = each.up.form.dequantise(torch.float64)
        assert ups.unflatten(1, (-1, each.down.form.num_inputs))[:, :, size:].count_nonzero() == 0
        assert ups.count_nonzero() > 0


def test_four_bits_of_one_matrix_have_factors_of_their_own() -> None:
    """Each projection's is kept as the checkpoint has it: none is scaled to another's."""
    kind = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))
    stack = Fp4Matrix(Fp4Precision(maker="modelopt"), (16, 128), 128, kind)
    for rows, factor in ((range(8), 0.3), (range(8, 16), 0.7)):
        places = stack.place_projection(Rows(torch.tensor(rows)), (), "any")
        places["weight"].store(torch.full((8, 64), 0x2A, dtype=torch.uint8))
        places["weight_scale"].store(torch.full((8, 8), 3.0).to(torch.float8_e4m3fn))
        places["weight_scale_2"].store(torch.tensor(factor))
    weights = stack.form.dequantise(torch.float32)
    expected = torch.tensor([-1.0, 1.0]) * 3 * torch.tensor([0.3] * 8 + [0.7] * 8)[:, None]
    assert torch.equal(weights, expected.repeat(1, 64))


def test_scales_that_are_powers_of_two_may_be_of_any_size() -> None:
    """Rows have factors, so that float8 holds a row's scales, but for those that are nothing beside
    its largest."""
    kind = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))
    stack = Fp4Matrix(Fp4Precision(maker="compressed-tensors", group=32), (2, 128), 128, kind)
    places = stack.place_projection(Rows(torch.arange(2)), (), "any")
    places["weight_packed"].store(torch.full((2, 64), 0x77, dtype=torch.uint8))
    powers = torch.tensor([[20, 3, 10, 2], [200, 199, 190, 183]], dtype=torch.uint8)
    places["weight_scale"].store(powers)
    expected = 6 * torch.exp2(powers.float() - 127)
    expected[0, 3] = 0
    assert torch.equal(stack.form.dequantise(torch.float32)[:, ::32], expected)


def test_projections_of_one_matrix_share_the_largest_scale_of_their_inputs() -> None:
    kind = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))
    precision = Fp8Precision(strategy="tensor", is_static=True)
    stack = Fp8Matrix(precision, (16, 128), 128, kind, rows=1)
    for rows, scale in ((range(8), 0.5), (range(8, 16), 0.25)):
        places = stack.place_projection(Rows(torch.tensor(rows)), (), "any")
        places["input_scale"].store(torch.tensor([scale]))
    assert stack.form.input_scale == 0.5


@pytest.mark.parametrize("precision", [Fp8Precision(strategy="block"), _PACKED], ids=["fp8", "4"])
def test_the_rows_of_experts_are_found_out_once_for_all(monkeypatch, precision) -> None:
    """A checkpoint of 512 experts a layer has 70,000 projections."""
    compared: list[int] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *a: compared.append(1) or equal(*a))
    kind = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))
    counts = []
    for num_experts in (2, 64):
        whole = Cut.all_of(128)
        sizes = ExpertSizes(
            hidden_size=128,
            size=128,
            num_experts=num_experts,
            num_shared=0,
            experts=Cut.all_of(num_experts),
            units=whole,
            shared_units=whole,
        )
        experts = precision.experts(sizes, USUAL_NAMES, kind)
        compared.clear()
        places = experts.placements()
        for name, place in places.items():
            if name.endswith(("weight", "weight_packed")):
                words = torch.int32 if precision is _PACKED else torch.float8_e4m3fn
                place.store(torch.zeros(place.shape, dtype=torch.uint8).to(words))
        counts.append(len(compared))
    assert counts[0] == counts[1]


def test_layers_that_a_checkpoint_left_raw_stay_so(tmp_path: Path) -> None:
    """A shared expert of another form than the others stands beside them."""
    stored, meant = write(
        "qwen3_5_moe",
        tmp_path,
        "gptq",
        left=lambda path: "shared_expert" in path or "layers.3" in path,
        **EXPERTS,
    )
    assert relative_error(logits(load_model(stored)[0]), logits(load_model(meant)[0])) < 1e-4


HEADS: dict[str, tuple[str, str, Callable[[str], bool], dict[str, Any]]] = {
    "as the rest, but for one projection": ("qwen3_5", "packed", lambda path: path == "mtp.fc", {}),
    "raw": ("qwen3_5_moe", "gptq", lambda path: path.startswith("mtp."), EXPERTS),
    "alone": ("qwen3_5", "awq", lambda path: not path.startswith("mtp."), {}),
    "experts": ("qwen3_next", "fp8-blocks", lambda path: path == "mtp.fc", EXPERTS),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_has_a_precision_of_its_own(case: str, tmp_path: Path) -> None:
    name, form, left, sizes = HEADS[case]
    stored, meant = write(name, tmp_path, form, left=left, has_head=True, **sizes)
    model, _ = load_model(stored, LoadOptions(dtype="float64", head="mtp"))
    expected = load_meant(meant, stored, ROUNDINGS.get(form, RawPrecision()), has_head=True)
    (_, logits), (_, wanted) = (drafted(each, TOKENS, [0, 69]) for each in (model, expected))
    assert relative_error(logits, wanted) < 1e-4


def test_a_dense_head_of_a_mixture_may_be_quantised(tmp_path: Path) -> None:
    """Which kind it is shows from its tensors' names alone."""
    stored, _ = write("qwen3_5_moe", tmp_path, "gptq", **EXPERTS, has_head=True)
    config = json.loads((stored / "config.json").read_text())
    dense, _ = write("qwen3_5", tmp_path / "dense", "gptq", has_head=True)
    tensors, others = (load_file(each / "model.safetensors") for each in (stored, dense))
    tensors = {key: each for key, each in tensors.items() if not key.startswith("mtp.")}
    tensors |= {key: each for key, each in others.items() if key.startswith("mtp.")}
    save_file(tensors, stored / "model.safetensors")
    (stored / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    model, _ = load_model(stored, LoadOptions(head="mtp"))
    assert isinstance(model.mtp.layer.blocks[1].parts[0], MLP)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_raw_checkpoint_is_rounded_on_the_fly(name: str, tmp_path: Path) -> None:
    """To the values that it would be stored with, but for their scales' own rounding."""
    sizes = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    stored, meant = write(
        name, tmp_path, "fp8-blocks", **(EXPERTS | sizes if "moe" in name else {})
    )
    made, _ = load_model(meant, LoadOptions(quantization="fp8"))
    read = dict(load_model(stored)[0].named_modules())
    forms = {key: each for key, each in made.named_modules() if isinstance(each, Fp8Matrix)}
    assert len(forms) > 8
    for key, stack in forms.items():
        values, expected = (each.form.dequantise(torch.float32) for each in (stack, read[key]))
        assert relative_error(values, expected) < (1e-2 if stack.rows == 128 else 4e-2)


@pytest.mark.parametrize(("form", "part"), [(form, part) for form in FORMATS for part in range(2)])
def test_a_missing_tensor_is_named(form: str, part: int, tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path, form)
    tensors = load_file(stored / "model.safetensors")
    own = [key for key in tensors if key.startswith(f"{QKV}.")]
    # What remains says that the projection is quantised.
    markers = ("qweight", "weight_packed", "weight_scale_inv", "weight_scale_2")
    if f"{QKV}.weight_packed" not in own and f"{QKV}.weight_scale_2" not in own:
        markers += ("weight_scale",)
    optional = ("input_scale", "input_global_scale") if "fp4" in form else ()
    others = [key for key in own if key.rpartition(".")[2] not in (*markers, *optional)]
    gone = (others or own)[part % len(others or own)]
    del tensors[gone]
    save_file(tensors, stored / "model.safetensors")
    if gone.endswith("g_idx"):
        load_model(stored)
        return
    with pytest.raises(WeightsError, match=gone):
        load_model(stored)


@pytest.mark.parametrize("form", ["fp8-channels", "int8-channels", "gptq"])
def test_multipliers_of_quantised_weights_are_refused(form: str, tmp_path: Path) -> None:
    """They would be lost, for what has them is a tensor of another name or of other numbers."""
    sizes = {"mamba_d_ssm": 128, "mamba_n_heads": 16, "num_hidden_layers": 1}
    stored, meant = write("falcon_h1", tmp_path, form, left=lambda p: "in_proj" in p, **sizes)
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.\w+.*'falcon_h1' has multipliers"):
        load_model(stored)
    load_model(meant, LoadOptions(quantization="fp8"))


def test_quantised_values_without_their_scales_are_refused(tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path, "fp8-blocks")
    tensors = load_file(stored / "model.safetensors")
    del tensors[f"{QKV}.weight_scale_inv"]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{QKV}\.weight' is F8_E4M3"):
        load_model(stored)


@pytest.mark.parametrize("form", ["fp8-blocks", "gptq"])
def test_quantised_embeddings_are_refused_as_such(form: str, tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path, form)
    tensors = load_file(stored / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    stem = name.removesuffix("weight")
    if form == "gptq":
        tensors[f"{stem}qweight"] = tensors.pop(name).to(torch.int32)
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{stem}weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.*quantised embeddings are not"):
        load_model(stored)


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path, "fp8-blocks")
    tensors = load_file(stored / "model.safetensors")
    tensors[f"{QKV}.weight_scale_inv"] = torch.ones(9, 1)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(WeightsError, match=r"weight_scale_inv' has shape \[9, 1\]"):
        load_model(stored)


def test_inputs_in_the_order_of_activations_are_refused(tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path, "gptq")
    tensors = load_file(stored / "model.safetensors")
    tensors[f"{QKV}.g_idx"] = tensors[f"{QKV}.g_idx"].flip(0)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(WeightsError, match="desc_act"):
        load_model(stored)


def test_modelopts_older_checkpoints_say_in_a_file_beside_how_they_are_quantised(tmp_path) -> None:
    stored, _ = write("qwen3_5", tmp_path, "modelopt")
    config = json.loads((stored / "config.json").read_text())
    expected = logits(load_model(stored)[0])
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="input_scale' has no place in the model"):
        load_model(stored)
    beside = stored / "hf_quant_config.json"
    whys = {'{"producer": {}}': ": not ModelOpt's", "[]": " holds a list", "{": ": cannot be read"}
    for settings, why in whys.items():
        beside.write_text(settings)
        with pytest.raises(ConfigError, match=rf"hf_quant_config\.json{why}"):
            load_model(stored)
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    model, read = load_model(stored)
    assert torch.equal(logits(model), expected)
    assert has_fp8_kv(read)


def test_a_method_must_fit_the_checkpoint(tmp_path: Path) -> None:
    stored, meant = write("qwen3_5", tmp_path, "awq")
    with pytest.raises(ConfigError, match="leave it out"):
        load_model(stored, LoadOptions(quantization="fp8"))
    with pytest.raises(UnsupportedModelError, match="on the fly"):
        load_model(meant, LoadOptions(quantization="awq"))


def test_dummy_weights_follow_the_configurations_lists() -> None:
    left = ["model.layers.0.mlp.gate", "lm_head"]
    settings = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": left,
    }
    forms = read_quantization(settings, (), has_files=False)
    quantised: Callable[[str], bool] = lambda path: forms.precision_of(path) != RawPrecision()  # noqa: E731
    assert not quantised("model.layers.0.mlp.gate")
    assert not quantised("lm_head")
    assert quantised("model.layers.0.mlp.gate_proj")
    assert quantised("model.layers.0.mlp.experts")
    assert replace(Rounding(), depth=1) != RawPrecision()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_dummy_numbers_of_four_bits_have_no_common_direction(group: int) -> None:
    """Else each product adds to it, and routers send all tokens to few experts."""
    form = Int4Precision(layout="awq", group=group, is_symmetric=False)
    kind = ModuleScope(dtype=torch.float32, device=torch.device("cpu"))
    matrix = form.matrix(512, 1024, kind)
    matrix.fill(0.02, torch.Generator().manual_seed(0))
    weight = matrix.form.dequantise(torch.float32)
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(weight.mean().item()) < 4 * 0.02 / weight.numel() ** 0.5


@pytest.mark.parametrize(
    ("group", "num_inputs", "named"),
    [
        (-1, 192, "down: 192 inputs with group_size=-1, one scale for all, are no multiple of 128"),
        (-1, 64, "down: 64 inputs with group_size=-1"),
        (64, 192, "down: 192 inputs are not whole pairs of groups of 64"),
        (128, 192, "down: 192 inputs are not whole pairs of groups of 128"),
    ],
)
def test_groups_that_kernels_do_not_scale_are_refused_as_they_are_loaded(
    group: int, num_inputs: int, named: str
) -> None:
    """The kernels load scales by blocks of inputs, and would take one group's for another's."""
    form = Int4Precision(layout="packed", group=group, is_symmetric=True)
    kind = ModuleScope(path="down", dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=named):
        form.matrix(64, num_inputs, kind)
    assert form.matrix(64, 384, kind).form.group in (group, 384)


@pytest.mark.parametrize("group", [16, 48, 96, 192, 320])
def test_groups_without_whole_blocks_are_no_form(group: int) -> None:
    with pytest.raises(AssertionError, match=f"groups of {group} inputs"):
        make_int4(72, 2 * 128 * group, group=group)
    assert make_int4(72, 768, group=384).group == 384
