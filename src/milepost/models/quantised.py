"""Rules about `quantization_config` that can be checked from its own settings. The module imports
nothing heavy, since they are also checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.errors import ConfigError, UnsupportedModelError

METHODS = (
    "fp8",
    "compressed-tensors",
    "awq",
    "gptq",
    "auto-round",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
)
"""Values of `quant_method` that are read."""
USE_INSTEAD = (
    "use the model's FP8 or 4-bit integer checkpoint, or its raw one with quantization='fp8'"
)
FOUR_BIT_FLOATS = (
    "of 4-bit floats NVFP4 is read as ModelOpt and compressed-tensors write it, MXFP4 as "
    f"compressed-tensors does; {USE_INSTEAD}"
)
_FOUR_BIT_METHODS = ("mxfp4", "petit_nvfp4")


def refuse_asked(settings: Mapping[str, Any], asked: str | None) -> None:
    """Raises an error if the requested method differs from the checkpoint's, or cannot be applied
    to a raw checkpoint, whose `settings` are empty."""
    if asked is None:
        return
    if settings and asked != settings.get("quant_method"):
        raise ConfigError(
            f"quantization={asked!r}: the checkpoint is quantised with "
            f"{settings.get('quant_method')!r}; leave it out"
        )
    if not settings and asked != "fp8":
        raise UnsupportedModelError(
            f"quantization={asked!r} cannot be made on the fly; that can be 'fp8', others come "
            "with their checkpoints"
        )


def refuse_method(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for a quantised checkpoint whose method is not read."""
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        advice = FOUR_BIT_FLOATS if method in _FOUR_BIT_METHODS else USE_INSTEAD
        raise UnsupportedModelError(
            f"quant_method={method!r} is not supported; supported are {', '.join(METHODS)}; "
            f"{advice}"
        )


def mapping_of(value: Any, what: str) -> Mapping[str, Any]:
    """Returns nested settings; empty if there are none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"quantization_config: {what}={value!r} is no mapping")
    return value


def is_made_for_fp8_kv(settings: Mapping[str, Any]) -> bool:
    """Whether these settings ask for float8 KV. Raises UnsupportedModelError for other KV
    formats."""
    algorithm = settings.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise UnsupportedModelError(
            f"kv_cache_quant_algo={algorithm!r} is not supported; supported is 'FP8' "
            "(kv_cache_dtype='bfloat16' keeps KV in the model's type)"
        )
    scheme = mapping_of(settings.get("kv_cache_scheme"), "kv_cache_scheme")
    if not scheme:
        return algorithm is not None
    kind = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor")
    is_plain = not scheme.get("dynamic") and scheme.get("symmetric", True)
    if kind != ("float", 8, "tensor") or not is_plain:
        raise UnsupportedModelError(
            f"kv_cache_scheme={dict(scheme)} is not supported; supported is float with 8 bits, "
            "by tensor, symmetric, not dynamic (kv_cache_dtype='bfloat16' keeps KV in the model's "
            "type)"
        )
    return True
