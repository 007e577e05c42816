"""Checkpoints whose activations have four bits too: `fp4_activations` rounds them as they were
calibrated, and is refused by name where that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.config import EngineConfig
from milepost.engine.assembly import auto
from milepost.engine.assembly.auto import load_options_of
from milepost.engine.assembly.bitwise import refuse_settings
from milepost.engine.assembly.rank import identity_of
from milepost.engine.assembly.sizing import pool_shape
from milepost.errors import ConfigError
from milepost.kernels.platform import device
from milepost.kernels.platform.device import find_chip
from milepost.kernels.products.forms.quantised import Fp4, Nibbles
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.layers.quantised.fp4 import Fp4Matrix
from milepost.models.kernel_list import list_kernels
from milepost.models.loading import LoadOptions, load_model
from milepost.parallel import ALONE
from tests.models.test_quantization import logits
from tests.numbers import relative_error
from tests.quantised import EXPERTS, write

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ASKED = LoadOptions(dtype="float64", fp4_activations=True)
MX_INPUTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
FACTORS = {"nvfp4": 1 / 371, "modelopt-nvfp4": 0.003, "mxfp4": 1.0}


def write_checkpoint(name: str, folder: Path, form: str, **sizes: Any) -> Path:
    stored, _ = write(name, folder, form, **sizes)
    if form == "mxfp4":
        config = json.loads((stored / "config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = MX_INPUTS
        (stored / "config.json").write_text(json.dumps(config))
    return stored


def round_nearest(form: Fp4, hidden: Tensor, factor: float) -> Tensor:
    """Rounds rows to the nearest numbers, in float64 and without the product's own functions."""
    groups = hidden.float().unflatten(-1, (-1, form.group))
    most = groups.abs().amax(-1, keepdim=True)
    if form.group == 16:
        scales = (most / (6 * factor)).clamp(max=448).to(torch.float8_e4m3fn).float() * factor
    else:
        scales = torch.exp2((most * 8 / 7).log2().floor() - 2)
    numbers = groups / scales.clamp(min=1e-30)
    nearest = (numbers.abs()[..., None] - E2M1).abs().argmin(-1)
    return (E2M1[nearest] * numbers.sign() * scales).flatten(-2)


@pytest.mark.parametrize(
    ("name", "form", "sizes"),
    [
        ("qwen3_5", "nvfp4", {}),
        ("qwen3_next", "nvfp4", EXPERTS),
        ("qwen3_5", "modelopt-nvfp4", {}),
        ("qwen3_5_moe", "mxfp4", EXPERTS),
    ],
)
def test_activations_are_rounded_in_every_projection(
    monkeypatch, name: str, form: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    stored = write_checkpoint(name, tmp_path, form, **sizes)
    model, _ = load_model(stored, ASKED)
    stacks = [each for each in model.modules() if isinstance(each, Fp4Matrix)]
    assert {type(each.form) for each in stacks} == {W4A4}
    assert {each.form.input_factor.item() for each in stacks} == {
        torch.tensor(FACTORS[form]).item()
    }
    plain, _ = load_model(stored, LoadOptions(dtype="float64"))
    unrounded = logits(plain)
    monkeypatch.setattr(
        Nibbles, "round_inputs", lambda self, hidden: round_nearest(self, hidden, FACTORS[form])
    )
    expected = logits(plain)
    assert relative_error(logits(model), expected) < 1e-4
    assert relative_error(unrounded, expected) > 1e-2


def test_dummy_weights_have_factors(tmp_path: Path) -> None:
    stored = write_checkpoint("qwen3_5", tmp_path, "nvfp4")
    options = LoadOptions(dtype="float64", fp4_activations=True, load_format="dummy")
    assert logits(load_model(stored, options)[0]).isfinite().all()


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    for form in ("nvfp4-weights", "modelopt-nvfp4-weights", "mxfp4", "awq"):
        stored, meant = write("qwen3_5", tmp_path / form, form)
        for folder in (stored, meant):
            with pytest.raises(ConfigError, match="not made for activations in four bits"):
                load_model(folder, ASKED)


def test_a_projection_without_a_scale_is_named(tmp_path: Path) -> None:
    stored = write_checkpoint("qwen3_5", tmp_path, "nvfp4")
    tensors = load_file(stored / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("up_proj.input_global_scale"))
    del tensors[gone]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ConfigError, match=gone.rpartition(".")[0]):
        load_model(stored, ASKED)
    assert load_model(stored, LoadOptions())


def test_chips_that_do_not_multiply_them_are_named(monkeypatch, tmp_path: Path) -> None:
    stored = write_checkpoint("qwen3_5", tmp_path, "nvfp4")
    config = EngineConfig(model=str(stored), fp4_activations=True)
    monkeypatch.setattr(device, "triton_version", lambda: (3, 7))
    spark = replace(find_chip("sm_120"), arch="sm_121", capability=(12, 1))
    for chip in (*map(find_chip, ("sm_80", "sm_89", "sm_90", "gfx950")), spark):
        monkeypatch.setattr(auto, "probe", lambda _, chip=chip: chip)
        with pytest.raises(ConfigError, match=f"fp4_activations.*for {chip.arch}"):
            load_options_of(config, stored, torch.device("cuda"), ALONE)
    for chip, minor in ((find_chip("sm_100"), 6), (find_chip("sm_120"), 6), (spark, 8)):
        monkeypatch.setattr(auto, "probe", lambda _, chip=chip: chip)
        monkeypatch.setattr(device, "triton_version", lambda minor=minor: (3, minor))
        assert load_options_of(config, stored, torch.device("cuda"), ALONE).fp4_activations


def test_the_table_of_kernels_lists_them() -> None:
    model = "bench/models/hybrid-35b-a3b-nvfp4"
    rows = list(list_kernels(model, "sm_120", None, fp4_activations=True))
    served = {row[3] for row in rows if row[1].startswith("w4a4")}
    assert {"w4a4 gemm", "w4a4 grouped"} <= {name.partition(",")[0] for name in served}
    assert not any(row[1].startswith("fp4") for row in rows)
    with pytest.raises(ConfigError, match="no products of four-bit floats for sm_89"):
        next(list_kernels(model, "sm_89", None, fp4_activations=True))


def test_the_bitwise_mode_has_no_such_kernel() -> None:
    with pytest.raises(ConfigError, match="fp4_activations has no kernel with one order"):
        refuse_settings(EngineConfig(fp4_activations=True, batch_invariant=True))


def test_it_is_part_of_the_cache_keys(tmp_path: Path) -> None:
    stored = write_checkpoint("qwen3_5", tmp_path, "nvfp4")
    model, _ = load_model(stored)
    shape = pool_shape(EngineConfig(), model, torch.device("cpu"), None)
    identities = {
        identity_of(EngineConfig(fp4_activations=asked), stored, model, shape, {})
        for asked in (False, True)
    }
    assert len(identities) == 2
