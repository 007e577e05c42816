"""Knows all architectures, reads a checkpoint's `config.json`, applies overrides, and refuses
settings that nothing here supports."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

from milepost.config import DType
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
from milepost.models.folder import read_object, reading
from milepost.models.names import TEXT, read_settings
from milepost.models.quantization import quantization_settings, read_modelopt_file


@lru_cache
def known() -> Mapping[str, Architecture]:
    """Returns the architectures that the files of `architectures` declare, by `model_type`."""
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
"""Maps a setting to a test for supported values, and these values in words."""
_WINDOWS = ("sliding_window", "attention_chunk_size")


Overrides = Mapping[str, Any]


def load_config(folder: Path, overrides: Overrides | None = None) -> PreTrainedConfig:
    """Reads `config.json`. Raises ConfigError if it is missing, and UnsupportedModelError if the
    model is not supported.

    `overrides` replace settings in it; objects are merged, so their settings replace those of the
    object in the file. Raises ConfigError for an override of a setting that the configuration does
    not have.
    """
    path = folder / "config.json"
    raw = read_object(path)
    with reading(path):
        architecture = find_architecture(raw.get("model_type"))
        if raw["model_type"] not in CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"model_type={raw['model_type']!r} is not known to transformers {__version__}; "
                "install a newer one"
            )
        kind = CONFIG_MAPPING[raw["model_type"]]
        settings = read_settings(raw, overrides or {}, architecture, kind)
        text = settings[TEXT] if TEXT in kind.sub_configs else settings
        # Checked before the configuration class reads them, because it renames some.
        refuse_layer_types(text.get("layer_types") or (), architecture)
        _refuse_types(settings)
        if text.get("per_layer_config"):
            raise UnsupportedModelError("per_layer_config is not supported; layers are alike")
        try:
            with warnings.catch_warnings():
                # This warning is about a model without positions; users can do nothing about it.
                warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
                config = kind.from_dict(settings)
        except _INVALID as error:
            raise UnsupportedModelError(f"{path}: not a valid configuration ({error})") from error
        refuse_unsupported(config.get_text_config(), architecture)
        if not quantization_settings(config) and (from_modelopt := read_modelopt_file(folder)):
            config.quantization_config = from_modelopt
    return config


def _refuse_types(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for weights in a dtype that no kernel multiplies."""
    for name, holder in (("", settings), (f"{TEXT}.", settings.get(TEXT) or {})):
        quantization = holder.get("quantization_config")
        if not isinstance(quantization, Mapping | None):
            raise UnsupportedModelError(f"{name}quantization_config={quantization!r} is no object")
        dtype = holder.get("dtype")
        if dtype is not None and dtype not in _TYPES:
            raise UnsupportedModelError(
                f"{name}dtype={dtype!r} is not supported; supported are {', '.join(_TYPES)}"
            )


_TYPES = ("bfloat16", "float16", "float32", "float64")
_INVALID = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError)


def resolve_dtype(dtype: DType | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    """Returns the dtype of weights and activations. `auto` means the checkpoint's, or float32 if it
    does not say."""
    if isinstance(dtype, torch.dtype):
        return dtype
    named = dtype if dtype != "auto" else config.dtype or config.get_text_config().dtype
    resolved = getattr(torch, named) if isinstance(named, str) else named or torch.float32
    assert isinstance(resolved, torch.dtype), "a configuration that was read names a type of torch"
    return resolved
