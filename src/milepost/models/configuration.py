"""A checkpoint's `config.json`: read, overridden, and refused where we do not run what it says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from milepost.config import DType
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.models.quantization import quantization_settings, read_modelopt_file
from milepost.models.registry import find_architecture, refuse_layer_types, refuse_unsupported

Overrides = Mapping[str, Any]


def load_config(folder: Path, overrides: Overrides | None = None) -> PreTrainedConfig:
    """Read `config.json`; raises ConfigError if it isn't there, UnsupportedModelError if we don't
    run it.

    `overrides` stand in place of settings in it; objects in them in place of the same settings of
    the object there. Raises ConfigError for one that the configuration does not have.
    """
    path = folder / "config.json"
    try:
        raw = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration ({error})") from error
    architecture = find_architecture(raw.get("model_type"))
    # Before they are read as a configuration, which renames some.
    refuse_layer_types((raw.get("text_config") or raw).get("layer_types") or (), architecture)
    try:
        with warnings.catch_warnings():
            # That a setting has another name by now is nothing that who runs the model can mend.
            warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if overrides:
                _check_overrides(config, overrides)
                config = type(config).from_dict(_merged(raw, overrides))
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnsupportedModelError(f"{path}: not a valid configuration ({error})") from error
    refuse_unsupported(config.get_text_config(), architecture)
    if not quantization_settings(config) and (own := read_modelopt_file(folder)):
        config.quantization_config = own
    return config


def _check_overrides(config: PreTrainedConfig, overrides: Overrides, where: str = "") -> None:
    """Raise ConfigError for a setting that nothing reads."""
    for name, value in overrides.items():
        if not hasattr(config, name):
            inner = config.get_text_config()
            hint = ": those of the text model stand in text_config" if inner is not config else ""
            raise ConfigError(f"hf_overrides: config.json has no {where}{name} to override{hint}")
        own = getattr(config, name)
        if isinstance(own, PreTrainedConfig) and isinstance(value, Mapping):
            _check_overrides(own, value, f"{where}{name}.")


def _merged(own: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    found = dict(own)
    for name, value in overrides.items():
        inner = found.get(name)
        are_objects = isinstance(inner, Mapping) and isinstance(value, Mapping)
        found[name] = _merged(inner, value) if are_objects else value
    return found


def resolve_dtype(dtype: DType | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    """The type of weights and activations; `auto` is the checkpoint's, float32 if it doesn't
    say."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        return getattr(torch, dtype)
    named = config.dtype or config.get_text_config().dtype
    if isinstance(named, str):
        named = getattr(torch, named)
    return named or torch.float32
