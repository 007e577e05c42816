"""Reads the configurations of quantised checkpoints from all makers but compressed-tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp4Precision, Fp8Precision, Int4Precision
from milepost.models.quantised import FOUR_BIT_FLOATS, USE_INSTEAD, mapping_of
from milepost.models.quantization.rules import (
    Expression,
    Group,
    LowPrecision,
    RuleSet,
    any_of,
    below,
    expression,
    group_size_of,
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
    *("kv_cache_scheme", "kv_cache_quant_algo", "group_size", "quantized_layers"),
}
_KNOWN_OF_MODELOPT_GROUP = {"weights", "input_activations", "targets"}
_NVFP4 = Fp4Precision(maker="modelopt")
_MODELOPT: Mapping[Any, LowPrecision] = {
    "FP8": Fp8Precision(strategy="tensor", is_static=True),
    "NVFP4": replace(_NVFP4, rounds=True),
    "W4A16_NVFP4": _NVFP4,
}
"""Maps `quant_algo` to the form that the checkpoint was made for."""
_CALIBRATION = {
    *("tokenizer", "dataset", "model_seqlen", "max_input_length", "pad_token_id", "batch_size"),
    *("cache_block_outputs", "damp_percent", "damp_auto_increment", "mse", "true_sequential"),
    *("act_group_aware", "gptaq", "foem", "v2", "v2_alpha", "v2_memory_device"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "to_quant_block_names"),
    *("modules_in_block_to_quantize", "quant_block_list", "autoround_version", "iters", "lr"),
    *("minmax_lr", "nsamples", "seqlen", "amp", "gradient_accumulate_steps", "scale_dtype"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "provider"),
    *("low_gpu_mem_usage", "supported_types", "meta", "model_name_or_path"),
    *("model_file_base_name", "offload_to_disk", "offload_to_disk_path"),
}
"""Settings about calibration: its result is in the tensors, and so is which layers were
quantised."""
_KERNELS = {
    *("backend", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
}
"""Settings that choose kernels in other engines."""
_OF_ACTIVATIONS = {"act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"}
"""Settings of activations, without effect if activations have 16 bits."""
_KNOWN_OF_PACKED = {
    *("quant_method", "method", "bits", "group_size", "sym", "zero_point", "data_type", "dynamic"),
    *("version", "format", "checkpoint_format", "pack_dtype", "lm_head", "is_marlin_format"),
    *("desc_act", "static_groups", "modules_to_not_convert"),
    *_CALIBRATION,
    *_KERNELS,
    *_OF_ACTIVATIONS,
}
"""Known settings of AWQ and GPTQ, as their own makers, GPTQModel, transformers and AutoRound write
them. The tensors show whether inputs are in the order of activations (`desc_act`)."""
_KNOWN_OF_AUTOROUND = _KNOWN_OF_PACKED | {
    *("packing_format", "extra_config", "regex_config", "quant_lm_head", "super_group_size"),
}
_AUTOROUND_KEYS = ("bits", "group_size", "sym", "data_type")


def read_fp8(settings: Mapping[str, Any]) -> RuleSet:
    """Reads DeepSeek's and Qwen's own format, which transformers calls fine-grained FP8."""
    if settings.get("weight_block_size") is None:
        raise UnsupportedModelError(
            f"quant_method='fp8' is supported with weight_block_size only; {USE_INSTEAD}"
        )
    want(settings, "weight_block_size", [128, 128])
    want(settings, "activation_scheme", "dynamic", default="dynamic")
    want(settings, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    want(settings, "scale_fmt", "float", None)
    want_known(settings, _KNOWN_OF_FP8, where=_CONFIG)
    form = Fp8Precision(strategy="block", scale="weight_scale_inv")
    left = [name for name in ("modules_to_not_convert", "ignored_layers") if settings.get(name)]
    return (Group(form),), any_of(settings[left[0]] if left else None, "".join(left[:1]))


def read_awq(settings: Mapping[str, Any]) -> RuleSet:
    want_known(settings, _KNOWN_OF_PACKED, where=_CONFIG)
    want(settings, "method", "awq", None)
    return _read_awq(settings)


def _read_awq(settings: Mapping[str, Any]) -> RuleSet:
    _check_packed(settings)
    for name in ("version", "format", "checkpoint_format"):
        want(settings, name, "gemm", "GEMM", None)
    if settings.get("backend") == "llm-awq":
        raise UnsupportedModelError(
            f"{_CONFIG}: backend='llm-awq' is not supported; words have to be packed as autoawq's "
            "gemm has them"
        )
    form = Int4Precision(
        layout="awq",
        group=group_size_of(settings, 128, where=_CONFIG),
        is_symmetric=not settings.get("zero_point", True),
    )
    name = "modules_to_not_convert"
    is_named, left = any_of(settings.get(name), name), _left_out(settings)
    return (Group(form),), lambda path: is_named(path) or any(each.match(path) for each in left)


def read_gptq(settings: Mapping[str, Any]) -> RuleSet:
    want_known(settings, _KNOWN_OF_PACKED, where=_CONFIG)
    want(settings, "method", "gptq", None)
    return _read_gptq(settings)


def _read_gptq(settings: Mapping[str, Any]) -> RuleSet:
    _check_packed(settings)
    want(settings, "checkpoint_format", "gptq", "gptq_v2", None)
    want(settings, "format", "gptq", "gptq_v2", None)
    want_nothing(settings, "is_marlin_format", where=_CONFIG)
    version = settings.get("checkpoint_format") or settings.get("format")
    form = Int4Precision(
        layout="gptq",
        group=group_size_of(settings, 128, where=_CONFIG),
        is_symmetric=bool(settings.get("sym", True)),
        zero_offset=0 if version == "gptq_v2" else 1,
        has_order=True,
    )
    left = _left_out(settings)
    if not settings.get("lm_head"):
        left.append(expression(r"(.*\.)?lm_head", "lm_head"))
    return (Group(form),), lambda path: any(each.match(path) for each in left)


def _check_packed(settings: Mapping[str, Any]) -> None:
    """Checks the settings that AWQ, GPTQ and AutoRound share."""
    want(settings, "bits", 4)
    want(settings, "data_type", "int", None)
    want(settings, "pack_dtype", "int32", None)
    if (settings.get("act_bits") or 16) < 16:
        raise UnsupportedModelError(
            f"{_CONFIG}: act_bits={settings['act_bits']} is not supported; activations have to be "
            "in 16 bits"
        )


def _left_out(settings: Mapping[str, Any]) -> list[Expression]:
    """Reads GPTQModel's rules for single layers; returns those that leave layers out. Others are
    accepted only if they change nothing: `lm_head: {}` in Qwen's own checkpoints."""
    left = []
    for rule, changes in mapping_of(settings.get("dynamic"), "dynamic").items():
        if rule.startswith("-:"):
            left.append(expression(rule[2:], "dynamic"))
            continue
        expression(rule.removeprefix("+:"), "dynamic")
        others = mapping_of(changes, f"dynamic[{rule!r}]")
        if any(value != settings.get(name) for name, value in others.items()):
            raise UnsupportedModelError(
                f"dynamic[{rule!r}] gives some layers other bits; supported are only layers that "
                "are left out ('-:...')"
            )
    return left


def read_autoround(settings: Mapping[str, Any]) -> RuleSet:
    """Reads AutoRound's own format; its tensors are those of GPTQ or of AWQ."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    layout = packing.rpartition(":")[2]
    if settings.get("data_type", "int") != "int" or layout not in ("auto_gptq", "auto_awq"):
        raise UnsupportedModelError(
            f"quant_method='auto-round' with packing_format={packing!r} and data_type="
            f"{settings.get('data_type')!r} is not supported; supported are integers packed as "
            "auto_round:auto_gptq or auto_round:auto_awq"
        )
    want_known(settings, _KNOWN_OF_AUTOROUND, where=_CONFIG)
    left = [] if settings.get("quant_lm_head") else ["lm_head"]
    for setting, prefix in (("extra_config", ""), ("regex_config", "re:")):
        for name, extra in mapping_of(settings.get(setting), setting).items():
            if _is_left_in_16_bits(settings, extra, f"{setting}[{name!r}]"):
                left.append(prefix + name)
    as_written = {**settings, "zero_point": not settings.get("sym", True)}
    (groups, _) = (_read_gptq if layout == "auto_gptq" else _read_awq)(as_written)
    return groups, any_of(left, "extra_config")


def _is_left_in_16_bits(settings: Mapping[str, Any], extra: Any, where: str) -> bool:
    """Whether settings of one layer leave it in 16 bits. Refuses any other difference from the
    rest."""
    overrides = mapping_of(extra, where)
    bits = overrides.get("bits", settings.get("bits"))
    if bits == 16:
        return True
    if any(overrides.get(key, settings.get(key)) != settings.get(key) for key in _AUTOROUND_KEYS):
        raise UnsupportedModelError(
            f"{where} gives some layers {bits} bits or groups of another size; supported are only "
            "layers that are left in 16 bits"
        )
    return False


def read_modelopt(settings: Mapping[str, Any]) -> RuleSet:
    """Reads NVIDIA's ModelOpt: FP8 with one scale per projection and one for its activations,
    NVFP4, or both for different projections."""
    want_known(settings, _KNOWN_OF_MODELOPT, where=_CONFIG)
    for name, group in mapping_of(settings.get("config_groups"), "config_groups").items():
        checked = mapping_of(group, name)
        want_known(checked, _KNOWN_OF_MODELOPT_GROUP, where=name)
        for what in ("weights", "input_activations"):
            values = mapping_of(checked.get(what), f"{name}.{what}")
            want_nothing(values, "dynamic", where=f"{name}.{what}")
            _check_group_size(values, f"{name}.{what}", has_groups=values.get("num_bits") == 4)
    left = settings.get("ignore") or settings.get("exclude_modules") or ()
    is_left = any_of((f"re:{fnmatch.translate(each)}" for each in left), "ignore")
    if settings.get("quant_algo") == "MIXED_PRECISION":
        return _mixed(mapping_of(settings.get("quantized_layers"), "quantized_layers")), is_left
    return (Group(_modelopt_form(settings, _CONFIG)),), is_left


def _mixed(layers: Mapping[str, Any]) -> tuple[Group, ...]:
    paths: dict[LowPrecision, list[str]] = {}
    for name, layer in layers.items():
        where = f"quantized_layers[{name!r}]"
        form = _modelopt_form(mapping_of(layer, where), where)
        want_known(layer, {"quant_algo", "group_size"}, where=where)
        paths.setdefault(form, []).append(name)
    if not layers:
        raise UnsupportedModelError(
            f"{_CONFIG}: quant_algo='MIXED_PRECISION' needs quantized_layers, which say the "
            "precision of each"
        )
    return tuple(Group(form, below(layer)) for form, layer in paths.items())


def _modelopt_form(settings: Mapping[str, Any], where: str) -> LowPrecision:
    algorithm = settings.get("quant_algo")
    if algorithm not in _MODELOPT:
        advice = FOUR_BIT_FLOATS if "FP4" in str(algorithm) else USE_INSTEAD
        raise UnsupportedModelError(
            f"{where}: quant_algo={algorithm!r} of ModelOpt is not supported; supported are "
            f"{', '.join(_MODELOPT)} and MIXED_PRECISION of these; {advice}"
        )
    form = _MODELOPT[algorithm]
    _check_group_size(settings, where, has_groups=isinstance(form, Fp4Precision))
    return form


def _check_group_size(settings: Mapping[str, Any], where: str, *, has_groups: bool) -> None:
    """Checks the group size: 16 for NVFP4, also if it is missing; none for other forms."""
    if not (has_groups and settings.get("group_size") == _NVFP4.group):
        want_nothing(settings, "group_size", where=where)
