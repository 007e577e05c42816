"""Reads how a checkpoint is quantised, and says which form each projection has.

Known are the official block FP8 (`quant_method` "fp8"), compressed-tensors' FP8 and four-bit
weights, ModelOpt's FP8, AWQ, GPTQ and AutoRound. What a checkpoint leaves in the model's type stays
so: where there are files their tensors decide, without files (dummy weights) the configuration's
lists do.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp8Precision, Int4Precision
from milepost.layers.weights import RAW, Precision

Rule = Callable[[str], bool]
Form = Fp8Precision | Int4Precision

SKIPPED = (r".*\.[qkv]_scale$", r".*\.kv_scale$", r".*\.prob_scale$")
"""Scales of what attention multiplies, but for those of KV that have a place (see
`layers.kv_scales`)."""
_STAY_RAW = re.compile(
    r"(.*\.)?(lm_head|embed_tokens|gate|router|shared_expert_gate|in_proj_(a|b|ba)|[abfg]_(a_|b_)?"
    r"proj|dt_proj|x_proj)$"
)
"""Projections that are not rounded on the fly: small, and answers depend on them most."""

_FOUR_BIT_METHODS = ("mxfp4", "modelopt_fp4", "petit_nvfp4")
_AUTOROUND_KEYS = ("bits", "group_size", "sym", "data_type")
_FOUR_BIT_FLOATS = (
    "NVFP4 and MXFP4 have no kernels here (only chips from sm_100 on multiply in them): use the "
    "model's FP8 or 4-bit integer checkpoint"
)


@dataclass(frozen=True, slots=True)
class _Group:
    """Projections of one form."""

    form: Form
    targets: Rule = field(default=lambda _: True)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The forms of a checkpoint's projections."""

    groups: tuple[_Group, ...]
    is_left: Rule
    """Whether the configuration leaves a projection in the model's type."""
    names: Container[str] = ()
    """Of the checkpoint's tensors; none where there are no files."""
    has_files: bool = False

    def precision_of(self, path: str) -> Precision:
        """The form of the projection at `path`, or of the experts below it."""
        examples = [path]
        if path.endswith(".experts"):
            examples = [f"{path}.0.{each}" for each in ("gate_proj", "up_proj", "w1")]
        for group in self.groups:
            form = group.form
            if not any(group.targets(each) for each in examples):
                continue
            if self.has_files:
                if self._holds(path, examples, form):
                    return form
            elif not any(self.is_left(each) for each in (path, *examples)):
                return form
        return RAW

    def _holds(self, path: str, examples: Iterable[str], form: Form) -> bool:
        if isinstance(form, Fp8Precision) and form.strategy == "none":
            return not any(self.is_left(each) for each in (path, *examples))
        found = (f"{each}.{marker}" for each in examples for marker in form.markers)
        stacked = f"{path}.gate_up_proj_scale_inv"
        return any(name in self.names for name in found) or stacked in self.names


def on_the_fly(method: str) -> Quantization:
    """For a raw checkpoint whose weights are rounded while they are loaded; raises
    UnsupportedModelError."""
    if method != "fp8":
        raise UnsupportedModelError(
            f"quantization={method!r} cannot be made on the fly; that can be 'fp8', others come "
            "with their checkpoints"
        )
    is_left = lambda path: _STAY_RAW.fullmatch(path) is not None  # noqa: E731
    return Quantization((_Group(Fp8Precision(strategy="none")),), is_left, has_files=True)


def quantization_settings(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The configuration's `quantization_config`; empty if it has none. Of a multimodal checkpoint
    it is set on the outer one."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(), "quantization_config", None) or {}


def has_fp8_kv(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is made for KV in float8; raises UnsupportedModelError for KV in what
    is not supported."""
    scheme = quantization_settings(config).get("kv_cache_scheme")
    if not scheme:
        return False
    kind = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor")
    if kind != ("float", 8, "tensor") or scheme.get("dynamic"):
        raise UnsupportedModelError(
            f"kv_cache_scheme={dict(scheme)} is not supported; supported is float with 8 bits, "
            "by tensor, not dynamic (kv_cache_dtype='bfloat16' keeps KV in the model's type)"
        )
    return True


def read_quantization(
    settings: Mapping[str, Any], names: Container[str], *, has_files: bool
) -> Quantization:
    """What `quantization_config` says; raises UnsupportedModelError for what is not supported."""
    method = settings.get("quant_method")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "auto-round": _read_autoround,
        "modelopt": _read_modelopt,
    }
    if method not in readers:
        others = f"; {_FOUR_BIT_FLOATS}" if method in _FOUR_BIT_METHODS else ""
        raise UnsupportedModelError(
            f"quant_method={method!r} is not supported; supported are {', '.join(readers)}{others}"
        )
    groups, is_left = readers[method](settings)
    return Quantization(groups, is_left, names, has_files)


Read = tuple[tuple[_Group, ...], Rule]


def _read_fp8(settings: Mapping[str, Any]) -> Read:
    """DeepSeek's and Qwen's own format, which transformers calls fine-grained FP8."""
    if settings.get("weight_block_size") is None:
        raise UnsupportedModelError("quant_method='fp8' is supported with weight_block_size only")
    _want(settings, "weight_block_size", [128, 128])
    _want(settings, "activation_scheme", "dynamic", default="dynamic")
    _want(settings, "fmt", "e4m3", default="e4m3")
    _want(settings, "scale_fmt", "float", default="float")
    form = Fp8Precision(strategy="block", scale="weight_scale_inv")
    left = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    return (_Group(form),), _any_of(left)


def _read_compressed(settings: Mapping[str, Any]) -> Read:
    groups = []
    for name, group in (settings.get("config_groups") or {}).items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        kind = weights.get("type", "int"), weights.get("num_bits")
        if kind == ("float", 8):
            form: Form = _compressed_fp8(name, weights, inputs)
        elif kind == ("int", 4) and inputs is None:
            form = _compressed_int4(name, weights, group.get("format") or settings.get("format"))
        else:
            activations = "" if inputs is None else f", {inputs.get('num_bits')}-bit activations"
            raise UnsupportedModelError(
                f"{name}: weights of type {kind[0]} with {kind[1]} bits{activations} are not "
                "supported; supported are float8 weights with float8 activations, and 4-bit "
                f"integer weights with raw activations; {_FOUR_BIT_FLOATS}"
            )
        groups.append(_Group(form, _targets(group.get("targets") or ["Linear"])))
    if not groups and not settings.get("kv_cache_scheme"):
        raise UnsupportedModelError("quantization_config has no config_groups")
    _want(settings, "quantization_status", "compressed", default="compressed")
    return tuple(groups), _any_of(settings.get("ignore") or ())


def _compressed_fp8(
    name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> Form:
    strategy = weights.get("strategy")
    if strategy not in ("block", "channel", "tensor"):
        raise UnsupportedModelError(
            f"{name}: strategy={strategy!r} is not supported for float8 weights; supported are "
            "block, channel, tensor"
        )
    if inputs is None or inputs.get("type") != "float" or inputs.get("num_bits") != 8:
        raise UnsupportedModelError(f"{name}: float8 weights need float8 activations")
    if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
        raise UnsupportedModelError(
            f"{name}: block_structure={weights.get('block_structure')} is not supported; "
            "supported is [128, 128]"
        )
    return Fp8Precision(strategy=strategy, is_static=not inputs.get("dynamic"))


def _compressed_int4(name: str, weights: Mapping[str, Any], layout: str | None) -> Form:
    if layout != "pack-quantized" or weights.get("strategy") not in ("group", "channel"):
        raise UnsupportedModelError(
            f"{name}: format={layout!r} with strategy={weights.get('strategy')!r} is not "
            "supported for 4-bit weights; supported is pack-quantized by group or channel"
        )
    return Int4Precision(
        layout="packed",
        group=weights.get("group_size") or -1,
        is_symmetric=bool(weights.get("symmetric", True)),
        has_order=True,
    )


def _read_awq(settings: Mapping[str, Any]) -> Read:
    _want(settings, "bits", 4)
    _want(settings, "version", "gemm", default="gemm")
    form = Int4Precision(
        layout="awq",
        group=settings.get("group_size", 128),
        is_symmetric=not settings.get("zero_point", True),
    )
    return (_Group(form),), _any_of(settings.get("modules_to_not_convert") or ())


def _read_gptq(settings: Mapping[str, Any]) -> Read:
    _want(settings, "bits", 4)
    version = settings.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        _want(settings, "checkpoint_format", "gptq")
    form = Int4Precision(
        layout="gptq",
        group=settings.get("group_size", 128),
        is_symmetric=bool(settings.get("sym", True)),
        zero_offset=0 if version == "gptq_v2" else 1,
        has_order=True,
    )
    left = [re.compile(rule[2:]) for rule in settings.get("dynamic") or {} if rule[:2] == "-:"]
    others = [rule for rule in settings.get("dynamic") or {} if rule[:2] != "-:"]
    if others:
        raise UnsupportedModelError(
            f"dynamic[{others[0]!r}] gives some layers other bits; supported are only layers that "
            "are left out ('-:...')"
        )
    if not settings.get("lm_head"):
        left.append(re.compile(r"(.*\.)?lm_head"))
    return (_Group(form),), lambda path: any(each.match(path) for each in left)


def _read_autoround(settings: Mapping[str, Any]) -> Read:
    """AutoRound's own method; its tensors are those of GPTQ or of AWQ."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    layout = packing.rpartition(":")[2]
    if settings.get("data_type", "int") != "int" or layout not in ("auto_gptq", "auto_awq"):
        raise UnsupportedModelError(
            f"quant_method='auto-round' with packing_format={packing!r} and data_type="
            f"{settings.get('data_type')!r} is not supported; supported are integers packed as "
            "auto_round:auto_gptq or auto_round:auto_awq"
        )
    extra = settings.get("extra_config") or {}
    left = []
    for name, own in extra.items():
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
    (groups, _) = (_read_gptq if layout == "auto_gptq" else _read_awq)(as_written)
    return groups, _any_of((*left, "lm_head"))


def _read_modelopt(settings: Mapping[str, Any]) -> Read:
    """NVIDIA's ModelOpt: FP8 with a scale for each projection and one for what it reads."""
    if settings.get("quant_algo") != "FP8":
        raise UnsupportedModelError(
            f"quant_method='modelopt' with quant_algo={settings.get('quant_algo')!r} is not "
            f"supported; supported is 'FP8'; {_FOUR_BIT_FLOATS}"
        )
    form = Fp8Precision(strategy="tensor", is_static=True)
    left = settings.get("ignore") or settings.get("exclude_modules") or ()
    return (_Group(form),), _any_of(f"re:{fnmatch.translate(each)}" for each in left)


def _want(settings: Mapping[str, Any], name: str, wanted: Any, default: Any = None) -> None:
    value = settings.get(name, default)
    if value != wanted:
        raise UnsupportedModelError(
            f"quantization_config: {name}={value!r} is not supported; supported is {wanted!r}"
        )


def _any_of(patterns: Iterable[str]) -> Rule:
    """Whether a path is, or is below, one of these modules, or matches `re:` patterns."""
    rules = [_matcher(each) for each in patterns]
    return lambda path: any(rule(path) for rule in rules)


def _targets(targets: Iterable[str]) -> Rule:
    """Names of classes are all projections: there is no telling them apart by a path."""
    named = [each for each in targets if "." in each or each.startswith("re:")]
    return _any_of(named) if named else lambda _: True


def _matcher(pattern: str) -> Rule:
    if pattern.startswith("re:"):
        expression = re.compile(pattern[3:])
        return lambda path: expression.match(path) is not None
    return lambda path: f".{pattern}." in f".{path}."
