"""Resolves `auto` and other settings: the model's folder, the device, number types, how a rank
loads the model.

Read by the process that starts the ranks and by each of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from milepost.config import DType, EngineConfig
from milepost.engine.assembly.images import takes_images
from milepost.errors import ConfigError
from milepost.kernels.platform.device import probe, require_fp4
from milepost.kernels.platform.tensors import FP8
from milepost.models.folder import EMBEDDED_MODEL, find_folder
from milepost.models.loading import Head, LoadOptions
from milepost.models.quantization import has_fp8_kv
from milepost.models.registry import load_config, resolve_dtype
from milepost.parallel import Ranks


def folder_of(config: EngineConfig) -> Path:
    """Returns the model's folder; without a model, that of the embedded one. Raises ConfigError."""
    source = config.model or str(EMBEDDED_MODEL)
    has_weights = config.load_format != "dummy"
    return find_folder(
        source,
        revision=config.revision,
        with_weights=has_weights,
        download_dir=config.download_dir,
        token=config.hf_token,
    )


def device_of(name: str, rank: int = 0) -> torch.device:
    """Returns the device of a rank. Ranks use consecutive GPUs, starting at the named one."""
    device = _named_device(name)
    if rank and device.type == "cuda":
        return torch.device("cuda", (device.index or 0) + rank)
    return device


def _named_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: use auto, cpu, cuda or cuda:0 ...") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch sees no CUDA device here; use device='cpu'")
    return device


def load_options_of(
    config: EngineConfig, folder: Path, device: torch.device, ranks: Ranks
) -> LoadOptions:
    """Returns how one of `ranks` loads the model."""
    whole = load_config(folder, config.overrides)
    return LoadOptions(
        dtype=_dtype_of(config, whole, device),
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        head=_head_of(config),
        quantization=config.quantization,
        fp4_activations=_rounds_to_fp4(config, device),
        max_model_len=config.max_model_len,
        overrides=config.overrides,
        has_tower=takes_images(config, whole),
        batch_invariant=config.batch_invariant,
        ranks=ranks,
    )


def _rounds_to_fp4(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether activations are rounded to four bits. Raises ConfigError if they are to be,
    and the device cannot multiply them; a CPU runs the definition."""
    if config.fp4_activations and device.type == "cuda":
        require_fp4(probe(device))
    return config.fp4_activations


def _dtype_of(config: EngineConfig, whole: PreTrainedConfig, device: torch.device) -> DType:
    """Returns the dtype of weights. On a CPU, `auto` avoids half precision, which is slower there
    and less exact than float32."""
    if config.dtype != "auto" or device.type != "cpu":
        return config.dtype
    stored = resolve_dtype("auto", whole)
    return "float32" if stored.itemsize < torch.float32.itemsize else "auto"


def _head_of(config: EngineConfig) -> Head:
    """Returns whether to load the checkpoint's drafting head; `auto` loads it if that
    is possible."""
    methods = config.speculative_config.methods if config.speculative_config else ()
    return "mtp" if "mtp" in methods else "auto" if "auto" in methods else "none"


def kv_dtype_of(
    config: EngineConfig, dtype: torch.dtype, whole: PreTrainedConfig
) -> torch.dtype | None:
    """Returns the dtype of keys and values; None for the model's."""
    asked = config.kv_cache_dtype
    if asked == "auto":
        return FP8 if has_fp8_kv(whole) else None
    if asked == "bfloat16":
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"kv_cache_dtype='bfloat16' with a model in {str(dtype).removeprefix('torch.')}: "
                "use 'auto' for the model's own type, or 'fp8'"
            )
        return None
    return FP8


def runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps overlap. By default they do if the host would otherwise wait for the device."""
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
