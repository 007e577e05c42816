"""Reads the configurations of compressed-tensors: groups of projections, each with formats for its
weights and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp4Precision, Fp8Precision, Int4Precision, Int8Precision
from milepost.models.quantised import FOUR_BIT_FLOATS, USE_INSTEAD, mapping_of
from milepost.models.quantization.rules import (
    Group,
    LowPrecision,
    Rule,
    RuleSet,
    any_of,
    group_size_of,
    want,
    want_known,
    want_nothing,
)

_KNOWN = {
    "quant_method",
    "format",
    "quantization_status",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "global_compression_ratio",
    "version",
    "run_compressed",
    "provider",
}
_KNOWN_OF_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
_KNOWN_OF_VALUES = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"),
    *("dynamic", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
"""Known settings of `weights` and `input_activations`."""
_BLOCK = [128, 128]
_CLASSES = ("Linear", "GraniteMoeHybridParallelExpertsLinear")
_FP4_GROUPS: Mapping[tuple[Any, Any, Any], Literal[16, 32]] = {
    ("nvfp4-pack-quantized", "tensor_group", 16): 16,
    ("mxfp4-pack-quantized", "group", 32): 32,
}
"""Maps format, strategy and `group_size` to the number of inputs that share a scale."""


def read_compressed(settings: Mapping[str, Any]) -> RuleSet:
    """Reads a `quantization_config` of compressed-tensors. Raises UnsupportedModelError, naming the
    setting."""
    where = "quantization_config"
    want_known(settings, _KNOWN, where=where)
    want(settings, "quantization_status", "compressed", default="compressed")
    want_nothing(settings, "transform_config", where=where)
    sparsity = mapping_of(settings.get("sparsity_config"), "sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise UnsupportedModelError(
            f"sparsity_config: format={sparsity['format']!r} is not supported; weights have to be "
            "dense"
        )
    groups = {
        name: mapping_of(group, f"config_groups[{name!r}]")
        for name, group in mapping_of(settings.get("config_groups"), "config_groups").items()
    }
    # A group that names modules is more specific than one that names a class.
    ordered = sorted(groups.items(), key=lambda group: bool(_classes(group[1])))
    read_groups = tuple(_read_group(name, group, settings.get("format")) for name, group in ordered)
    if not groups and not settings.get("kv_cache_scheme"):
        raise UnsupportedModelError("quantization_config has no config_groups")
    return read_groups, any_of(settings.get("ignore"), "ignore")


def _read_group(name: str, group: Mapping[str, Any], layout: str | None) -> Group:
    layout = group.get("format") or layout
    want_known(group, _KNOWN_OF_GROUP, where=name)
    want_nothing(group, "output_activations", where=name)
    weights = mapping_of(group.get("weights"), f"{name}.weights")
    inputs = group.get("input_activations")
    inputs = None if inputs is None else mapping_of(inputs, f"{name}.input_activations")
    kind = weights.get("type", "int"), weights.get("num_bits")
    if kind == ("float", 8) or (kind == ("int", 8) and inputs is not None):
        form = _eight_bits(name, weights, inputs, layout)
    elif kind == ("int", 4) and inputs is None:
        form = _int4(name, weights, layout)
    elif kind == ("float", 4) and _are_four_bits(inputs):
        form = _fp4(name, weights, layout, rounds=inputs is not None)
    else:
        activations = "" if inputs is None else f", {inputs.get('num_bits')}-bit activations"
        raise UnsupportedModelError(
            f"{name}: weights of type {kind[0]} with {kind[1]} bits{activations} are not "
            "supported; supported are float8 weights with float8 activations, 8-bit integer "
            "weights with 8-bit integer activations, 4-bit integer weights with raw activations, "
            "and 4-bit float weights, with 4-bit activations or raw ones; "
            f"{FOUR_BIT_FLOATS if kind == ('float', 4) else USE_INSTEAD}"
        )
    for what, values in (("weights", weights), ("input_activations", inputs or {})):
        want_known(values, _KNOWN_OF_VALUES, where=f"{name}.{what}")
    return Group(form, _targets(name, group))


@dataclass(frozen=True, slots=True, kw_only=True)
class _EightBits:
    """A type of eight bits that weights and activations may both have."""

    name: str
    strategies: tuple[str, ...]
    formats: tuple[str | None, ...]
    precision: type[Fp8Precision]


_EIGHT_BITS = {
    "float": _EightBits(
        name="float8",
        strategies=("block", "channel", "tensor"),
        formats=("float-quantized", "naive-quantized", None),
        precision=Fp8Precision,
    ),
    "int": _EightBits(
        name="int8",
        strategies=("channel", "tensor"),
        formats=("int-quantized", "naive-quantized", None),
        precision=Int8Precision,
    ),
}


def _eight_bits(
    name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: str | None
) -> LowPrecision:
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    known = _EIGHT_BITS[kind]
    if strategy not in known.strategies:
        raise UnsupportedModelError(
            f"{name}: strategy={strategy!r} is not supported for {known.name} weights; supported "
            f"are {', '.join(known.strategies)}"
        )
    if inputs is None or (inputs.get("type", "int"), inputs.get("num_bits")) != (kind, 8):
        raise UnsupportedModelError(f"{name}: {known.name} weights need {known.name} activations")
    if strategy == "block" and list(weights.get("block_structure") or ()) != _BLOCK:
        raise UnsupportedModelError(
            f"{name}: block_structure={weights.get('block_structure')} is not supported; "
            "supported is [128, 128]"
        )
    if layout not in known.formats:
        raise UnsupportedModelError(f"{name}: format={layout!r} is not supported for {known.name}")
    for what, values in (("weights", weights), ("input_activations", inputs)):
        if not values.get("symmetric", True):
            raise UnsupportedModelError(
                f"{name}.{what}: symmetric=False is not for {known.name}: zero points are not read"
            )
    want_nothing(weights, "dynamic", "actorder", where=f"{name}.weights")
    _check_inputs(name, strategy, inputs)
    return known.precision(strategy=strategy, is_static=not inputs.get("dynamic"))


def _check_inputs(name: str, strategy: str, inputs: Mapping[str, Any]) -> None:
    """Refuses scales of activations for other sets of values than those that kernels round
    together."""
    dynamic, each = inputs.get("dynamic", False), inputs.get("strategy")
    if strategy == "block":
        fits = (
            dynamic is True and each in (None, "group") and inputs.get("group_size") in (None, 128)
        )
    elif dynamic:
        fits = dynamic is True and each in (None, "token")
    else:
        fits = each in (None, "tensor")
    if not fits:
        raise UnsupportedModelError(
            f"{name}.input_activations: strategy={each!r} with dynamic={dynamic!r} and group_size="
            f"{inputs.get('group_size')!r} is not supported; supported are dynamic groups of 128 "
            "for weights by block, and dynamic by token or static by tensor for others"
        )


def _are_four_bits(inputs: Mapping[str, Any] | None) -> bool:
    """Whether activations are raw, or have four bits on chips that can multiply these."""
    return inputs is None or (inputs.get("type"), inputs.get("num_bits")) == ("float", 4)


def _fp4(
    name: str, weights: Mapping[str, Any], layout: str | None, *, rounds: bool
) -> LowPrecision:
    kind = layout, weights.get("strategy"), weights.get("group_size")
    if kind not in _FP4_GROUPS:
        raise UnsupportedModelError(
            f"{name}: format={kind[0]!r} with strategy={kind[1]!r} and group_size={kind[2]!r} is "
            "not supported for 4-bit floats; supported are nvfp4-pack-quantized by tensor_group "
            "of 16 and mxfp4-pack-quantized by group of 32"
        )
    if not weights.get("symmetric", True):
        raise UnsupportedModelError(f"{name}.weights: symmetric=False is not for 4-bit floats")
    want_nothing(weights, "dynamic", where=f"{name}.weights")
    _check_order(name, weights)
    return Fp4Precision(maker="compressed-tensors", group=_FP4_GROUPS[kind], rounds=rounds)


def _int4(name: str, weights: Mapping[str, Any], layout: str | None) -> LowPrecision:
    if layout != "pack-quantized" or weights.get("strategy") not in ("group", "channel"):
        raise UnsupportedModelError(
            f"{name}: format={layout!r} with strategy={weights.get('strategy')!r} is not "
            "supported for 4-bit weights; supported is pack-quantized by group or channel"
        )
    _check_order(name, weights)
    return Int4Precision(
        layout="packed",
        group=group_size_of(weights, None, where=f"{name}.weights"),
        is_symmetric=bool(weights.get("symmetric", True)),
        has_order=True,
    )


def _check_order(name: str, weights: Mapping[str, Any]) -> None:
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise UnsupportedModelError(
            f"{name}.weights: actorder={order!r} is not supported; groups have to be in the "
            "inputs' own order (None, 'weight' or 'static')"
        )


def _targets(name: str, group: Mapping[str, Any]) -> Rule:
    """Returns the rule for a group's targets. The only classes supported are `Linear`, which stands
    for all projections, as a path does not tell them apart, and the class of Granite's stacked
    experts."""
    classes = _classes(group)
    for each in classes:
        if each not in _CLASSES:
            raise UnsupportedModelError(
                f"{name}: targets has {each!r}; supported are 'Linear', modules and 're:' patterns"
            )
    return (lambda _: True) if classes else any_of(group["targets"], f"{name}.targets")


def _classes(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets") or ["Linear"]
    return [each for each in targets if each[:1].isupper() and "." not in each]
