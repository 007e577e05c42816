"""Reads a checkpoint's `config.json`, applies overrides, and refuses settings that are not
supported."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

from milepost.config import DType
from milepost.errors import UnsupportedModelError
from milepost.models.folder import read_object, reading
from milepost.models.names import TEXT, read_settings
from milepost.models.quantization import quantization_settings, read_modelopt_file
from milepost.models.registry import find_architecture, refuse_layer_types, refuse_unsupported

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
    found = getattr(torch, named) if isinstance(named, str) else named or torch.float32
    assert isinstance(found, torch.dtype), "a configuration that was read names a type of torch"
    return found
