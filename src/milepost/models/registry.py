"""Which architectures there are, and what of a configuration is refused because nothing here runs
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.models.hybrid import Architecture
from milepost.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from milepost.models.qwen3_next import QWEN3_NEXT

ARCHITECTURES: Mapping[str, Architecture] = {
    model_type: architecture
    for architecture in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
    for model_type in architecture.model_types
}
"""`model_type` -> architecture."""

_LAYER_TYPES = ("full_attention", "linear_attention")


def find_architecture(model_type: str | None) -> Architecture:
    """The architecture of a `config.json`; raises UnsupportedModelError that lists those there
    are."""
    try:
        return ARCHITECTURES[model_type or ""]
    except KeyError:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        ) from None


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for the first setting of a text configuration that would be
    ignored."""
    for name, (is_supported, wanted) in _REQUIREMENTS.items():
        value = getattr(config, name, None)
        if not is_supported(value):
            raise UnsupportedModelError(f"{name}={value!r} is not supported; supported is {wanted}")
    refuse_layer_types(config.layer_types)
    _refuse_uneven_heads(config)
    num_experts = getattr(config, "num_experts", 0)
    if num_experts and not 1 <= config.num_experts_per_tok <= num_experts:
        raise UnsupportedModelError(
            f"num_experts_per_tok={config.num_experts_per_tok} is not within "
            f"num_experts={num_experts}"
        )


def refuse_layer_types(layer_types: Iterable[str]) -> None:
    """Raise UnsupportedModelError for the first kind of layer that nothing here runs."""
    for layer_type in layer_types:
        if layer_type not in _LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer type {layer_type!r} is not supported; supported are "
                f"{', '.join(_LAYER_TYPES)}"
            )


def _is_unset(value: Any) -> bool:
    return not value


_REQUIREMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "quantization_config": (_is_unset, "an unquantized checkpoint"),
    "compression_config": (_is_unset, "an unquantized checkpoint"),
    "linear_conv_kernel_dim": (lambda value: value is None or value > 1, "2 or more"),
    "hidden_act": (lambda value: value in ("silu", "swish"), "silu"),
    "use_sliding_window": (_is_unset, "false"),
    "sliding_window": (_is_unset, "none"),
    "attention_chunk_size": (_is_unset, "none"),
    "attn_output_gate": (lambda value: value in (None, True), "true"),
    "attn_logit_softcapping": (_is_unset, "none"),
    "final_logit_softcapping": (_is_unset, "none"),
    "is_encoder_decoder": (_is_unset, "false"),
}
"""Setting -> what holds for values that are run, and in words."""


def _refuse_uneven_heads(config: PreTrainedConfig) -> None:
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, many) % getattr(config, few):
            raise UnsupportedModelError(
                f"{many}={getattr(config, many)} is not a multiple of {few}={getattr(config, few)}"
            )
