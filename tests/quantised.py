"""Writes quantised checkpoints in their published layouts, beside raw ones of the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.kernels.products.forms.quantised import quantise_fp8
from tests.checkpoints import save
from tests.mtp import add_head

Tensors = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Tensors, Tensor]]
"""A projection's weight -> the tensors that stand for it, and the weight that they mean."""
Choose = Callable[[str], Quantise | None]
"""A projection's path -> how it is written; None: raw."""

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_NEVER = (
    *("embed_tokens", "embeddings", "word_embeddings", "gate", "router", "layer", "conv1d"),
    *("shared_expert_gate", "visual", "in_proj_a", "in_proj_b", "in_proj_ba"),
    *("b_proj", "f_b_proj", "g_b_proj"),
)
"""Projections that nobody quantises."""
_OTHER_PARTS = ("model.visual.", "model.vision_tower.", "model.merger.", "model.time", "time_")
"""Beginnings of paths beside the text part, which is quantised alone."""


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales = quantise_fp8(weight)
    scales = scales.to(torch.bfloat16)
    each = scales.float().repeat_interleave(128, 0)[: len(weight)]
    each = each.repeat_interleave(128, 1)[:, : weight.shape[1]]
    return {"weight": values, "weight_scale_inv": scales}, values.float() * each


def fp8_channels(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().max() / 448).view(1)
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor([0.02])}
    return tensors, values.float() * scale


def int8_channels(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16)
    values = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()


def int8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    """With a scale of activations that cuts off the largest."""
    scale = (weight.abs().max() / 127.5).view(1)
    values = (weight / scale).round().clamp(-128, 127)
    tensors = {
        "weight": values.to(torch.int8),
        "weight_scale": scale,
        "input_scale": torch.tensor([0.02]),
    }
    return tensors, values * scale


def _as_numbers(tensors: Tensors, meant: Tensor) -> tuple[Tensors, Tensor]:
    """Scales without dimensions, as ModelOpt writes them."""
    return {n: each.view(()) if each.numel() == 1 else each for n, each in tensors.items()}, meant


def _round4(weight: Tensor, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [O, I], scales and zero points [O, G]."""
    groups = weight.unflatten(1, (-1, group))
    if symmetric:
        scales = groups.abs().amax(-1) / 7
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / 15
        zeros = (-low / scales).round()
    q = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return q.flatten(1).int(), scales, zeros.int()


def _meant4(q: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    each = [part.repeat_interleave(group, 1) for part in (scales, zeros)]
    return (q - each[1]) * each[0]


def _words(q: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers a word along `dim`: the p-th four bits hold number order[p]."""
    eights = F.pad(q, (0, 0, 0, -len(q) % 8)) if dim == 0 else q
    eights = eights.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    word = sum(eights[..., order[p]] << 4 * p for p in range(8))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def awq(weight: Tensor, group: int = 32, *, symmetric: bool = False) -> tuple[Tensors, Tensor]:
    q, scales, zeros = _round4(weight, group, symmetric=symmetric)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _words(q.T.contiguous(), 1, order),
        "qzeros": _words(zeros.T.contiguous(), 1, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, _meant4(q, scales, zeros, group)


def gptq(
    weight: Tensor, group: int = 32, *, symmetric: bool = True, version: int = 1
) -> tuple[Tensors, Tensor]:
    q, scales, zeros = _round4(weight, group, symmetric=symmetric)
    tensors = {
        "qweight": _words(q.T.contiguous(), 0),
        "qzeros": _words((zeros - int(version == 1)).T.contiguous(), 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }
    return tensors, _meant4(q, scales, zeros, group)


def packed(weight: Tensor, group: int = 64, *, symmetric: bool = True) -> tuple[Tensors, Tensor]:
    group = weight.shape[1] if group == -1 else group
    q, scales, zeros = _round4(weight, group, symmetric=symmetric)
    tensors = {
        "weight_packed": _words(q, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros, 0)
    return tensors, _meant4(q, scales, zeros, group)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _to_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of numbers as bytes, the first of a pair in the low half; and what they mean."""
    nearest = (values.abs()[..., None] - _E2M1).abs().argmin(-1)
    bits = nearest + 8 * (values < 0)
    pairs = bits.unflatten(-1, (-1, 2))
    meant = _E2M1[nearest] * torch.where(values < 0, -1, 1)
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), meant


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes, scales, a factor for all, and the weight that they mean."""
    factor = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / (6 * factor)).to(torch.float8_e4m3fn)
    each = scales.float()[..., None] * factor
    packed, meant = _to_e2m1((groups / each).flatten(1))
    return packed, scales, factor, (meant.unflatten(1, (-1, 16)) * each).flatten(1)


def nvfp4(weight: Tensor, *, rounds_inputs: bool = True) -> tuple[Tensors, Tensor]:
    """As compressed-tensors writes it."""
    packed, scales, factor, meant = _nvfp4(weight)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": (1 / factor).view(1),
    }
    if rounds_inputs:
        tensors["input_global_scale"] = torch.tensor([371.0])
    return tensors, meant


def modelopt_nvfp4(weight: Tensor, *, rounds_inputs: bool = True) -> tuple[Tensors, Tensor]:
    packed, scales, factor, meant = _nvfp4(weight)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}
    if rounds_inputs:
        tensors["input_scale"] = torch.tensor(0.003)
    return tensors, meant


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    powers = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    each = torch.exp2(powers)[..., None]
    packed, meant = _to_e2m1((groups / each).clamp(-6, 6).flatten(1))
    tensors = {"weight_packed": packed, "weight_scale": (powers + 127).to(torch.uint8)}
    return tensors, (meant.unflatten(1, (-1, 32)) * each).flatten(1)


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if inputs is None else "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ["lm_head", "re:.*gate$"],
    }


def _fp4_compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str
) -> dict[str, Any]:
    return _compressed(weights, inputs) | {"format": layout}


def _modelopt(algorithm: str, **settings: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*gate"],
        "producer": {"name": "modelopt", "version": "0.45.0"},
        **settings,
    }


_FLOAT = {"type": "float", "num_bits": 8}
_FLOAT4 = {
    "type": "float",
    "num_bits": 4,
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": False,
    "observer": "static_minmax",
    "actorder": None,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}
_MXFP4 = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
_OF_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_INT8 = {"type": "int", "num_bits": 8, "symmetric": True, "group_size": None, "actorder": None}
_INT = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64}
FORMATS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "fp8-blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "fp8-channels": (
        fp8_channels,
        _compressed(
            _FLOAT | {"strategy": "channel"}, _FLOAT | {"dynamic": True, "strategy": "token"}
        ),
    ),
    "fp8-tensors": (
        fp8_tensor,
        _compressed(
            _FLOAT | {"strategy": "tensor"}, _FLOAT | {"dynamic": False, "strategy": "tensor"}
        ),
    ),
    "int8-channels": (
        int8_channels,
        _compressed(
            _INT8 | {"strategy": "channel", "dynamic": False, "observer": "mse"},
            _INT8 | {"strategy": "token", "dynamic": True, "observer": "memoryless"},
        )
        | {"format": "int-quantized"},
    ),
    "modelopt": (
        lambda weight: _as_numbers(*fp8_tensor(weight)),
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {"group_0": {"targets": ["Linear"]}},
            "ignore": ["lm_head", "*gate"],
        },
    ),
    "auto-round": (
        gptq,
        {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "group_size": 32,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"}},
        },
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}),
    "nvfp4": (
        nvfp4,
        _fp4_compressed(_FLOAT4, _FLOAT4 | {"dynamic": "local"}, "nvfp4-pack-quantized"),
    ),
    "mxfp4": (mxfp4, _fp4_compressed(_MXFP4, None, "mxfp4-pack-quantized")),
    "modelopt-nvfp4": (
        modelopt_nvfp4,
        _modelopt(
            "NVFP4",
            config_groups={
                "group_0": {
                    "input_activations": _OF_NVFP4,
                    "weights": _OF_NVFP4,
                    "targets": ["Linear"],
                }
            },
            kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
        ),
    ),
    "packed": (packed, _compressed(_INT, None)),
    "packed-asymmetric": (
        lambda weight: packed(weight, symmetric=False),
        _compressed(_INT | {"symmetric": False}, None),
    ),
}
"""Name -> how a projection is written, and what the configuration says of it."""
_GPTQ = {"quant_method": "gptq", "bits": 4}
VARIANTS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "fp8-compressed-blocks": (
        lambda weight: _renamed(fp8_blocks(weight), weight_scale_inv="weight_scale"),
        _compressed(
            _FLOAT | {"strategy": "block", "block_structure": [128, 128]},
            _FLOAT | {"dynamic": True, "strategy": "group", "group_size": 128},
        ),
    ),
    "int8-tensors": (
        int8_tensor,
        _compressed(
            _INT8 | {"strategy": "tensor", "dynamic": False},
            _INT8 | {"strategy": "tensor", "dynamic": False},
        )
        | {"format": "int-quantized"},
    ),
    "awq-128": (
        lambda weight: awq(weight, 128),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    ),
    "gptq-64": (lambda weight: gptq(weight, 64), _GPTQ | {"group_size": 64, "sym": True}),
    "gptq-128": (lambda weight: gptq(weight, 128), _GPTQ | {"group_size": 128, "sym": True}),
    "gptq-asymmetric": (
        lambda weight: gptq(weight, 128, symmetric=False),
        _GPTQ | {"group_size": 128, "sym": False},
    ),
    "gptq-2-asymmetric": (
        lambda weight: gptq(weight, symmetric=False, version=2),
        _GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "auto-round-awq": (
        lambda weight: awq(weight, 128, symmetric=True),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_awq",
        },
    ),
    "packed-32": (
        lambda weight: packed(weight, 32),
        _compressed(_INT | {"group_size": 32}, None),
    ),
    "packed-128-asymmetric": (
        lambda weight: packed(weight, 128, symmetric=False),
        _compressed(_INT | {"group_size": 128, "symmetric": False}, None),
    ),
    "nvfp4-weights": (
        lambda weight: nvfp4(weight, rounds_inputs=False),
        _fp4_compressed(_FLOAT4, None, "nvfp4-pack-quantized"),
    ),
    "modelopt-nvfp4-weights": (
        lambda weight: modelopt_nvfp4(weight, rounds_inputs=False),
        _modelopt("W4A16_NVFP4", group_size=16),
    ),
    "packed-channels": (
        lambda weight: packed(weight, -1),
        _compressed({"type": "int", "num_bits": 4, "strategy": "channel", "symmetric": True}, None),
    ),
}
"""The same layouts with other groups, zero points, versions and activations."""


def _mixed(path: str) -> Quantise | None:
    """As NVIDIA has Qwen3.6: attention in FP8, and with four bits what is largest; the head too."""
    if path == "lm_head" or (".mlp." in path and not path.startswith("mtp")):
        return modelopt_nvfp4
    return None if path.startswith("mtp") else FORMATS["modelopt"][0]


def _mixed_groups(path: str) -> Quantise | None:
    if path.startswith("model.layers."):
        return nvfp4 if ".mlp." in path else FORMATS["fp8-channels"][0]
    return None


_OF_FP8 = (
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
)
_OF_FOUR_BITS = ("gate_proj", "up_proj", "down_proj", "experts", "shared_expert")
MIXED: dict[str, tuple[Choose, dict[str, Any]]] = {
    "modelopt-mixed": (
        _mixed,
        _modelopt(
            "MIXED_PRECISION",
            ignore=["mtp*", "mtp.layers.0*"],
            quantized_layers={
                **{
                    f"model.layers.{layer}.{part}": {"quant_algo": "FP8"}
                    for layer in range(4)
                    for part in _OF_FP8
                },
                **{
                    f"model.layers.{layer}.mlp.{part}": {
                        "quant_algo": "W4A16_NVFP4",
                        "group_size": 16,
                    }
                    for layer in range(4)
                    for part in _OF_FOUR_BITS
                },
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
        ),
    ),
    "mixed-groups": (
        _mixed_groups,
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": "float-quantized",
                    "weights": _FLOAT | {"strategy": "channel"},
                    "input_activations": _FLOAT | {"dynamic": True, "strategy": "token"},
                },
                "group_1": {
                    "targets": ["re:.*mlp.(experts.*|.*_proj)$"],
                    "format": "nvfp4-pack-quantized",
                    "weights": _FLOAT4,
                    "input_activations": None,
                },
            },
            "ignore": ["lm_head", "re:.*gate$", "re:.*in_proj_[ab]$"],
        },
    ),
}
"""Of several precisions."""


def _renamed(written: tuple[Tensors, Tensor], **names: str) -> tuple[Tensors, Tensor]:
    tensors, meant = written
    return {names.get(name, name): tensor for name, tensor in tensors.items()}, meant


def write(
    name: str,
    folder: Path,
    form: str,
    *,
    left: Callable[[str], bool] = lambda _: False,
    has_head: bool = False,
    **sizes: Any,
) -> tuple[Path, Path]:
    """Two checkpoints of an architecture: a quantised one, and a raw one of the values that it
    means. Projections whose path is `left`, beside those that nobody quantises, stay raw."""
    choose, settings = _chooser(form)
    stored_folder, meant_folder = folder / "stored", folder / "meant"
    save(name, meant_folder, **(SIZES | sizes))
    if has_head:
        add_head(meant_folder)
    stored, meant = {}, {}
    for key, tensor in _one_by_one(load_file(meant_folder / "model.safetensors")).items():
        path, _, kind = key.rpartition(".")
        if form in ("fp8-channels", "int8-channels") and key.endswith(
            ("moe.input_linear.weight", "moe.output_linear.weight")
        ):
            each = [FORMATS[form][0](expert) for expert in tensor]
            for part in ("weight", "weight_scale"):
                stored[f"{path}.{part}"] = torch.stack([tensors[part] for tensors, _ in each])
            meant[key] = torch.stack([value for _, value in each])
            continue
        last = path.rpartition(".")[2]
        is_raw = last in _NEVER or path.startswith(_OTHER_PARTS) or left(path)
        quantise = None if is_raw else choose(path)
        if kind != "weight" or tensor.dim() != 2 or quantise is None:
            stored[key] = meant[key] = tensor
            continue
        tensors, value = quantise(tensor)
        stored |= {f"{path}.{part}": each.contiguous() for part, each in tensors.items()}
        meant[key] = value.contiguous()
    config = json.loads((meant_folder / "config.json").read_text())
    stored_folder.mkdir()
    (stored_folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings})
    )
    save_file(stored, stored_folder / "model.safetensors")
    save_file(meant, meant_folder / "model.safetensors")
    return stored_folder, meant_folder


def _chooser(form: str) -> tuple[Choose, dict[str, Any]]:
    if form in MIXED:
        return MIXED[form]
    quantise, settings = (FORMATS | VARIANTS)[form]
    return (lambda path: None if path == "lm_head" else quantise), settings


def _one_by_one(tensors: Tensors) -> Tensors:
    """Stacked experts as the projections of each, which is how they are quantised."""
    single: Tensors = {}
    for key, tensor in tensors.items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            single[key] = tensor
            continue
        prefix, _, kind = key.rpartition(".")
        for expert, weight in enumerate(tensor):
            if kind == "down_proj":
                single[f"{prefix}.{expert}.down_proj.weight"] = weight.contiguous()
            else:
                gate, up = weight.chunk(2)
                single[f"{prefix}.{expert}.gate_proj.weight"] = gate.contiguous()
                single[f"{prefix}.{expert}.up_proj.weight"] = up.contiguous()
    return single
