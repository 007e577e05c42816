"""What ranks keep of a checkpoint adds up to the whole model, for every architecture and form of
weights; what cannot be split is refused by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from milepost.errors import ConfigError
from milepost.models import Decoder, LoadOptions, load_model, weight_index
from milepost.parallel import Ranks
from tests.batches import Part, build_pools
from tests.checkpoints import save
from tests.numbers import relative_error
from tests.parallel.threads import run_ranks
from tests.quantised import write

PAGES = [3, 1]
EVEN: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
MIXTURE = {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MAMBA = {"mamba_d_ssm": 96, "mamba_n_heads": 12}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", EVEN | DELTA | MIXTURE),
    "qwen3_next_bias": ("qwen3_next", EVEN | DELTA | {"num_experts": 0, "attention_bias": True}),
    "qwen3_next_joint": (
        "qwen3_next",
        EVEN | DELTA | MIXTURE | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("qwen3_5", EVEN | DELTA),
    "qwen3_5_tied": ("qwen3_5", EVEN | DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe", EVEN | DELTA | MIXTURE),
    "nemotron_h": (
        "nemotron_h",
        EVEN
        | {
            "n_groups": 4,
            "mamba_head_dim": 8,
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        EVEN | MAMBA | {"mamba_rms_norm": False},
    ),
    "kimi_linear": (
        "kimi_linear",
        EVEN
        | {
            "num_key_value_heads": 8,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "moe_intermediate_size": 16,
        },
    ),
    "alice_ai": (
        "alice_ai",
        EVEN
        | {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        EVEN | {"num_key_value_heads": 8, "moe_intermediate_size": 16, "num_local_experts": 12},
    ),
    "bamba": ("bamba", EVEN | {"mamba_n_groups": 2, "mamba_n_heads": 8}),
    "granitemoehybrid": ("granitemoehybrid", EVEN | {"num_local_experts": 8, "mamba_n_heads": 8}),
    "olmo_hybrid": ("olmo_hybrid", EVEN | DELTA),
    "lfm2": ("lfm2", EVEN),
    "lfm2_moe": ("lfm2_moe", EVEN | {"num_experts": 8, "moe_intermediate_size": 16}),
    "lfm3": ("lfm3", EVEN),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Name -> its checkpoint."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        architecture, changes = MODELS[name]
        save(architecture, path, torch.float64, **changes)
        return path

    return folder


def logits(model: Decoder) -> Tensor:
    """Of a prompt that ends past the grid, and of a token behind it."""
    pools = build_pools(model)
    tokens = torch.arange(71) % 13
    first = Part(pages=PAGES, start=0, length=70, slot_in=0, slot_out=1)
    then = Part(pages=PAGES, start=70, length=1, slot_in=1, slot_out=1)
    found = [
        model.compute_logits(model(tokens[:70], pools.context([first]))),
        model.compute_logits(model(tokens[70:], pools.context([then], num_decodes=1))),
    ]
    return torch.cat(found)


@cache
def whole(folder: Path, **load: Any) -> Tensor:
    return logits(load_model(folder, LoadOptions(**load))[0])


def by_rank(folder: Path, size: int, *, load: Any = None, **how: Any) -> list[Tensor]:
    load = load or {}
    return run_ranks(
        size, lambda ranks: logits(load_model(folder, LoadOptions(ranks=ranks, **load))[0]), **how
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in MODELS),
        *((name, 4) for name in ("qwen3_next", "nemotron_h", "bamba", "olmo_hybrid")),
    ],
)
def test_ranks_answer_as_one_does(name, size, folder_of):
    """Two KV heads are one on each of four ranks; all ranks hold the same bits."""
    expected, found = whole(folder_of(name)), by_rank(folder_of(name), size)
    assert relative_error(found[0], expected) < 1e-12
    assert all(torch.equal(each, found[0]) for each in found)
    assert expected.std() > 0.5, "flat logits would show nothing"


@pytest.mark.parametrize("name", ["qwen3_next_joint", "kimi_linear", "bailing_hybrid", "alice_ai"])
def test_whole_experts_on_each_rank_answer_as_one_does(name, folder_of):
    found = by_rank(folder_of(name), 2, splits_experts=True)
    assert relative_error(found[0], whole(folder_of(name))) < 1e-12


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "kimi_linear", "bailing_hybrid"])
def test_a_rank_holds_its_part_and_no_more(name, folder_of):
    """But for norms, routers and what is small. Less than the whole is read, too."""
    folder = folder_of(name)
    full, _ = load_model(folder)
    halves = run_ranks(2, lambda ranks: load_model(folder, LoadOptions(ranks=ranks))[0])
    for half in halves:
        assert half.num_bytes < 0.6 * full.num_bytes
        assert sum(_bytes_of(spec) for spec in half.layer_specs) <= 0.6 * sum(
            _bytes_of(spec) for spec in full.layer_specs
        ) + _latents(full)


def _bytes_of(spec) -> int:
    shapes = [getattr(spec, name, ()) for name in ("conv_shape", "recurrent_shape")]
    heads = getattr(spec, "num_kv_heads", 0) * getattr(spec, "head_dim", 0)
    return heads + sum(torch.Size(shape).numel() for shape in shapes if shape)


def _latents(model: Decoder) -> int:
    """What every rank has all of."""
    return sum(_bytes_of(s) for s in model.layer_specs if getattr(s, "rows_each", 2) == 1)


def test_of_a_file_only_a_ranks_part_is_read(monkeypatch, folder_of):
    """Whole tensors are read only of what all ranks have."""
    read = []

    class Watched:
        def __init__(self, tensors) -> None:
            self._tensors = tensors

        def __enter__(self):
            self._opened = self._tensors.__enter__()
            return self

        def __exit__(self, *error):
            return self._tensors.__exit__(*error)

        def keys(self):
            return self._opened.keys()

        def get_slice(self, name):
            return self._opened.get_slice(name)

        def get_tensor(self, name):
            read.append(name)
            return self._opened.get_tensor(name)

    def opened(*args: Any, **options: Any) -> Watched:
        return Watched(safe_open(*args, **options))

    monkeypatch.setattr(weight_index, "safe_open", opened)
    run_ranks(2, lambda ranks: load_model(folder_of("qwen3_next"), LoadOptions(ranks=ranks))[0])
    ends = ("norm.weight", "gate.weight", "shared_expert_gate.weight")
    assert read
    assert [name for name in read if not name.endswith(ends)] == []


QUANTISED: dict[str, Any] = {
    "vocab_size": 104,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
SHARED_BLOCKS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
"""Half a block is on each of two ranks."""


@pytest.mark.parametrize(
    ("form", "how"),
    [
        *((form, "width") for form in ("fp8-blocks", "fp8-channels", "awq", "gptq")),
        *(("int8-channels", how) for how in ("width", "experts")),
        *((form, "width") for form in ("nvfp4", "mxfp4", "modelopt-nvfp4")),
        *((form, "experts") for form in ("fp8-tensors", "packed-asymmetric", "nvfp4")),
    ],
)
def test_quantised_weights_are_split_with_their_scales(form, how, tmp_path):
    """Where a token's activations have one scale, each rank rounds its own part of them. In
    float64, where no sum's last bits decide how one is rounded to eight.
    """
    folder, _ = write("qwen3_5_moe", tmp_path, form, **QUANTISED)
    load = {"dtype": torch.float64}
    found = by_rank(folder, 2, load=load, splits_experts=how == "experts")
    bound = {"fp8-channels": 0.15, "int8-channels": 0.05}.get(form, 1e-12)
    assert relative_error(found[0], whole(folder, **load)) < bound


def test_raw_weights_are_rounded_on_ranks_as_on_one(tmp_path):
    """Where parts are whole blocks."""
    _, folder = write("qwen3_5_moe", tmp_path, "fp8-blocks", **QUANTISED)
    load = {"dtype": torch.float64, "quantization": "fp8"}
    assert relative_error(by_rank(folder, 2, load=load)[0], whole(folder, **load)) < 1e-12


def test_parts_of_blocks_are_rounded_over_scales_of_their_own(tmp_path):
    """So answers are others, and no worse."""
    _, folder = write("qwen3_5_moe", tmp_path, "fp8-blocks", **QUANTISED | SHARED_BLOCKS)
    load = {"dtype": torch.float64, "quantization": "fp8"}
    raw, alone = whole(folder, dtype=torch.float64), whole(folder, **load)
    found = by_rank(folder, 2, load=load)[0]
    assert not torch.equal(found, alone)
    assert relative_error(found, raw) < 1.5 * relative_error(alone, raw)


@pytest.mark.parametrize(
    ("name", "changes", "size", "named"),
    [
        ("qwen3_5", {}, 3, "tensor_parallel_size=3: model.layers.0.linear_attn num_key_heads=4"),
        ("qwen3_5", {"num_key_value_heads": 6, "num_attention_heads": 12}, 4, "num_key_value_hea"),
        ("qwen3_5", {"vocab_size": 101}, 2, "vocab_size=101"),
        ("qwen3_5", {"intermediate_size": 50}, 4, "model.layers.0.mlp intermediate_size=50"),
        ("qwen3_next", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size=15"),
        (
            "falcon_h1",
            MAMBA | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            2,
            "n_groups=1, each normed at once and before it is gated",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(name, changes, size, named, tmp_path):
    save(name, tmp_path, **(EVEN | (DELTA if name.startswith("qwen") else {}) | changes))
    with pytest.raises(ConfigError, match=named):
        load_model(tmp_path, LoadOptions(ranks=Ranks(size=size)))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("kimi_linear", "model.layers.0.self_attn num_heads=4"),
        ("bailing_hybrid", "model.layers.0.attention num_heads=8"),
        ("nemotron_h", "backbone.layers.0.mixer num_heads=16"),
        ("granitemoehybrid", "model.layers.0.mamba num_heads=8"),
        ("bamba", "model.layers.0.mamba num_heads=8"),
        ("lfm2_moe", "model.layers.0.conv hidden_size=64"),
        ("olmo_hybrid", "model.layers.0.linear_attn num_key_heads=4"),
    ],
)
def test_what_three_ranks_cannot_share_is_refused_by_name(name, named, folder_of):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=3: {named} is not a multiple"):
        load_model(folder_of(name), LoadOptions(ranks=Ranks(size=3)))


def test_experts_that_do_not_divide_are_refused_by_name(tmp_path):
    save("qwen3_next", tmp_path, **(EVEN | DELTA | MIXTURE | {"num_experts": 6}))
    with pytest.raises(ConfigError, match="mlp num_experts=6"):
        load_model(tmp_path, LoadOptions(ranks=Ranks(size=4, splits_experts=True)))


def test_blocks_that_ranks_would_share_are_refused_by_name(tmp_path):
    folder, _ = write("qwen3_5_moe", tmp_path, "fp8-blocks", **QUANTISED | SHARED_BLOCKS)
    with pytest.raises(ConfigError, match=r"weight_scale_inv: a rank's part is not whole blocks"):
        load_model(folder, LoadOptions(ranks=Ranks(size=2)))


def test_groups_of_four_bits_that_ranks_would_share_are_refused_by_name(tmp_path):
    sizes = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}
    folder, _ = write("qwen3_5_moe", tmp_path, "gptq-64", **QUANTISED | sizes)
    named = "mlp: 96 inputs of a rank are not whole pairs of groups of 64; use a smaller tensor"
    with pytest.raises(ConfigError, match=named):
        load_model(folder, LoadOptions(ranks=Ranks(size=2)))
