"""Reads the configurations of the other makers of quantised checkpoints."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp8Precision, Int4Precision
from milepost.models.quantization.rules import (
    FOUR_BIT_FLOATS,
    Group,
    Read,
    any_of,
    expression,
    group_size_of,
    mapping_of,
    want,
    want_known,
    want_nothing,
)

_CONFIG = "quantization_config"
_KNOWN_OF_FP8 = {
    *("quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size"),
    *("modules_to_not_convert", "ignored_layers", "kv_cache_scheme"),
}
_KNOWN_OF_MODELOPT = {
    *("quant_method", "quant_algo", "ignore", "exclude_modules", "config_groups", "producer"),
    *("kv_cache_scheme", "kv_cache_quant_algo"),
}
_AUTOROUND_KEYS = ("bits", "group_size", "sym", "data_type")


def read_fp8(settings: Mapping[str, Any]) -> Read:
    """DeepSeek's and Qwen's own format, which transformers calls fine-grained FP8."""
    if settings.get("weight_block_size") is None:
        raise UnsupportedModelError("quant_method='fp8' is supported with weight_block_size only")
    want(settings, "weight_block_size", [128, 128])
    want(settings, "activation_scheme", "dynamic", default="dynamic")
    want(settings, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    want(settings, "scale_fmt", "float", None)
    want_known(settings, _KNOWN_OF_FP8, where=_CONFIG)
    form = Fp8Precision(strategy="block", scale="weight_scale_inv")
    left = [name for name in ("modules_to_not_convert", "ignored_layers") if settings.get(name)]
    return (Group(form),), any_of(settings[left[0]] if left else None, "".join(left[:1]))


def read_awq(settings: Mapping[str, Any]) -> Read:
    want(settings, "bits", 4)
    want(settings, "version", "gemm", "GEMM", default="gemm")
    form = Int4Precision(
        layout="awq",
        group=group_size_of(settings, 128, where=_CONFIG),
        is_symmetric=not settings.get("zero_point", True),
    )
    name = "modules_to_not_convert"
    return (Group(form),), any_of(settings.get(name), name)


def read_gptq(settings: Mapping[str, Any]) -> Read:
    want(settings, "bits", 4)
    want(settings, "checkpoint_format", "gptq", "gptq_v2", None)
    want(settings, "format", "gptq", "gptq_v2", None)
    want(settings, "pack_dtype", "int32", None)
    want_nothing(settings, "is_marlin_format", where=_CONFIG)
    version = settings.get("checkpoint_format") or settings.get("format")
    form = Int4Precision(
        layout="gptq",
        group=group_size_of(settings, 128, where=_CONFIG),
        is_symmetric=bool(settings.get("sym", True)),
        zero_offset=0 if version == "gptq_v2" else 1,
        has_order=True,
    )
    rules = mapping_of(settings.get("dynamic"), "dynamic")
    left = [expression(rule[2:], "dynamic") for rule in rules if rule[:2] == "-:"]
    others = [rule for rule in rules if rule[:2] != "-:"]
    if others:
        raise UnsupportedModelError(
            f"dynamic[{others[0]!r}] gives some layers other bits; supported are only layers that "
            "are left out ('-:...')"
        )
    if not settings.get("lm_head"):
        left.append(expression(r"(.*\.)?lm_head", "lm_head"))
    return (Group(form),), lambda path: any(each.match(path) for each in left)


def read_autoround(settings: Mapping[str, Any]) -> Read:
    """AutoRound's own method; its tensors are those of GPTQ or of AWQ."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    layout = packing.rpartition(":")[2]
    if settings.get("data_type", "int") != "int" or layout not in ("auto_gptq", "auto_awq"):
        raise UnsupportedModelError(
            f"quant_method='auto-round' with packing_format={packing!r} and data_type="
            f"{settings.get('data_type')!r} is not supported; supported are integers packed as "
            "auto_round:auto_gptq or auto_round:auto_awq"
        )
    if (settings.get("act_bits") or 16) < 16:
        raise UnsupportedModelError(
            f"quant_method='auto-round' with act_bits={settings['act_bits']} is not supported; "
            "activations have to be in 16 bits"
        )
    want_nothing(settings, "super_bits", "static_kv_dtype", "rotation_config", where=_CONFIG)
    left = []
    for name, extra in mapping_of(settings.get("extra_config"), "extra_config").items():
        own = mapping_of(extra, f"extra_config[{name!r}]")
        bits = own.get("bits", settings.get("bits"))
        if bits == 16:
            left.append(name)
            continue
        if any(own.get(key, settings.get(key)) != settings.get(key) for key in _AUTOROUND_KEYS):
            raise UnsupportedModelError(
                f"extra_config[{name!r}] gives some layers {bits} bits or groups of another size; "
                "supported are only layers that are left in 16 bits"
            )
    as_written = {**settings, "zero_point": not settings.get("sym", True)}
    (groups, _) = (read_gptq if layout == "auto_gptq" else read_awq)(as_written)
    return groups, any_of((*left, "lm_head"), "extra_config")


def read_modelopt(settings: Mapping[str, Any]) -> Read:
    """NVIDIA's ModelOpt: FP8 with a scale for each projection and one for what it reads."""
    if settings.get("quant_algo") != "FP8":
        raise UnsupportedModelError(
            f"quant_method='modelopt' with quant_algo={settings.get('quant_algo')!r} is not "
            f"supported; supported is 'FP8'; {FOUR_BIT_FLOATS}"
        )
    want_known(settings, _KNOWN_OF_MODELOPT, where=_CONFIG)
    for name, group in mapping_of(settings.get("config_groups"), "config_groups").items():
        for what in ("weights", "input_activations"):
            own = mapping_of(mapping_of(group, name).get(what), f"{name}.{what}")
            want_nothing(own, "dynamic", "group_size", where=f"{name}.{what}")
    form = Fp8Precision(strategy="tensor", is_static=True)
    left = settings.get("ignore") or settings.get("exclude_modules") or ()
    return (Group(form),), any_of((f"re:{fnmatch.translate(each)}" for each in left), "ignore")
