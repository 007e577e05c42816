"""Knows all architectures, and refuses configurations with settings that nothing here supports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.rotary import num_positions
from milepost.models import architectures
from milepost.models.architecture import (
    Architecture,
    Requirement,
    is_true_or_unset,
    is_unset,
    refuse_uneven,
)
from milepost.models.bounds import refuse_missing, refuse_positions
from milepost.models.early import unknown_type


@lru_cache
def known() -> Mapping[str, Architecture]:
    """Returns `model_type` -> architecture for all that the files of `architectures` declare."""
    by_type: dict[str, Architecture] = {}
    for architecture in _declared():
        for model_type in architecture.model_types:
            assert model_type not in by_type, f"{model_type} is declared once"
            by_type[model_type] = architecture
    return by_type


def _declared() -> Iterator[Architecture]:
    for module in iter_modules(architectures.__path__, f"{architectures.__name__}."):
        yield from import_module(module.name).ARCHITECTURES


def find_architecture(model_type: object) -> Architecture:
    """Returns the architecture for a `model_type`. Raises UnsupportedModelError, which lists the
    known ones."""
    architecture = known().get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise unknown_type(model_type, known())
    return architecture


def refuse_unsupported(config: PreTrainedConfig, architecture: Architecture) -> None:
    """Raises UnsupportedModelError for the first setting of a text configuration that would be
    ignored."""
    requirements = {**_REQUIREMENTS, **architecture.requirements}
    for name, (is_supported, wanted) in requirements.items():
        value = getattr(config, name, None)
        if not is_supported(value):
            raise UnsupportedModelError(f"{name}={value!r} is not supported; supported is {wanted}")
    if config.layer_types is None:
        raise UnsupportedModelError(
            "layer_types is missing: it says which layers have attention, and there is no default"
        )
    refuse_layer_types(config.layer_types, architecture)
    refuse_missing(lambda name: getattr(config, name, False))
    refuse_positions(num_positions(config))
    _refuse_windows(config, architecture)
    refuse_uneven(config, "num_attention_heads", "num_key_value_heads")
    refuse_uneven(config, "linear_num_value_heads", "linear_num_key_heads")
    refuse_uneven(config, "mamba_n_heads", "mamba_n_groups")
    refuse_uneven(config, "mamba_num_heads", "n_groups")
    for name in ("num_experts", "num_local_experts"):
        num_experts = getattr(config, name, 0)
        if num_experts and not 1 <= config.num_experts_per_tok <= num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok={config.num_experts_per_tok} is not within "
                f"{name}={num_experts}"
            )
        if num_experts:
            _refuse_groups(config, num_experts)


def _refuse_windows(config: PreTrainedConfig, architecture: Architecture) -> None:
    """Raises UnsupportedModelError for attention that sees less than a whole prompt, where the
    architecture has no layer type for it. A window that is switched off, or as long as any prompt,
    changes nothing."""
    for name in _WINDOWS:
        if name == "sliding_window" and "sliding_attention" in architecture.layer_types:
            continue
        size = getattr(config, name, None)
        is_off = name == "sliding_window" and getattr(config, "use_sliding_window", None) is False
        is_whole = type(size) is int and size >= num_positions(config)
        if size and not is_off and not is_whole:
            raise UnsupportedModelError(
                f"{name}={size!r} is not supported; supported are none, one that "
                "use_sliding_window=false switches off, and one as long as the longest prompt"
            )


def _refuse_groups(config: PreTrainedConfig, num_experts: int) -> None:
    """Raises UnsupportedModelError if a router's groups of experts do not fit the experts."""
    num_groups = getattr(config, "n_group", None) or 1
    num_chosen = getattr(config, "topk_group", None) or 1
    size = num_experts // num_groups
    fits = num_experts % num_groups == 0 and num_chosen <= num_groups
    if num_groups > 1:
        # Groups are compared by their two best experts.
        fits &= size > 1 and size * num_chosen >= config.num_experts_per_tok
    if not fits:
        raise UnsupportedModelError(
            f"topk_group={num_chosen} of n_group={num_groups} groups of num_experts={num_experts} "
            f"do not hold num_experts_per_tok={config.num_experts_per_tok}, or not two experts each"
        )


def refuse_layer_types(layer_types: Iterable[str], architecture: Architecture) -> None:
    """Raises UnsupportedModelError for the first layer type that the architecture does not
    support."""
    for layer_type in layer_types:
        if layer_type not in architecture.layer_types:
            raise UnsupportedModelError(
                f"layer type {layer_type!r} is not supported; supported are "
                f"{', '.join(architecture.layer_types)}"
            )


_REQUIREMENTS: dict[str, Requirement] = {
    "compression_config": (is_unset, "an unquantized checkpoint"),
    "hidden_act": (lambda value: value in ("silu", "swish"), "silu"),
    "use_sliding_window": (is_unset, "false"),
    "attn_output_gate": (is_true_or_unset, "true"),
    "output_gate_type": (lambda value: value in (None, "silu", "swish"), "swish"),
    "attn_logit_softcapping": (is_unset, "none"),
    "final_logit_softcapping": (is_unset, "none"),
    "is_encoder_decoder": (is_unset, "false"),
}
"""Setting -> a test for supported values, and these values in words."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
