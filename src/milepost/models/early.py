"""Refuses models that `config.json` alone shows to be unsupported, before torch and transformers
are imported, which takes seconds.

The rules are those of the full check, which follows (`engine/assembly/setup.py`). Model types are
read from the files of `architectures` without importing them. Otherwise this module only looks for
settings under their usual names. Anything else, such as aliases and overrides, is left to the full
check.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from milepost.config import EngineConfig
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.layers.positions import stretched
from milepost.models import architectures
from milepost.models.bounds import refuse_sizes
from milepost.models.folder import EMBEDDED_MODEL, find_folder, read_object, reading
from milepost.models.quantised import is_made_for_fp8_kv, refuse_asked, refuse_method
from milepost.parallel import Ranks


def refuse_early(config: EngineConfig) -> None:
    """Raises the error with which the engine would refuse this configuration, if that is certain
    already. Reads `config.json`, and loads nothing from the hub."""
    folder = _local_folder(config)
    if folder is None:
        return
    path = folder / "config.json"
    raw = read_object(path)
    with reading(path):
        if raw.get("model_type") not in declared_types():
            raise unknown_type(raw.get("model_type"), declared_types())
    text = raw.get("text_config") or raw.get("llm_config") or raw
    if config.overrides or not isinstance(text, Mapping):
        return
    with reading(path):
        refuse_sizes(text)
    _refuse_length(text, config.max_model_len)
    quantised = _quantization(folder, raw, text)
    if quantised is not None and config.kv_cache_dtype == "auto":
        is_made_for_fp8_kv(quantised)
    if quantised is not None:
        with reading("config.json" if config.tensor_parallel_size == 1 else folder):
            refuse_asked(quantised, config.quantization)
            if quantised:
                refuse_method(quantised)
    _refuse_split(text, Ranks(size=config.tensor_parallel_size))


def check_length(asked: int | None, limit: int) -> None:
    """Raises ConfigError for a length beyond the positions that the model supports."""
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked}: the model's own limit is {limit} positions; lower it, or "
            "stretch them with hf_overrides, as the model's card says"
        )


def _local_folder(config: EngineConfig) -> Path | None:
    """Returns the folder with the model's `config.json`; None if it must still be downloaded.
    Raises ConfigError for a path that does not exist."""
    source = config.model or str(EMBEDDED_MODEL)
    if Path(source).exists() or source.startswith((".", "~", "/")):
        return find_folder(source, revision=None, with_weights=False)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(
            source, "config.json", cache_dir=config.download_dir, revision=config.revision
        )
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _refuse_length(text: Mapping[str, Any], asked: int | None) -> None:
    """Checks the length, unless the file says in several places how positions are scaled."""
    positions = text.get("max_position_embeddings")
    ropes = [text[name] for name in ("rope_parameters", "rope_scaling") if text.get(name)]
    parameters = ropes[0] if ropes else {}
    if not isinstance(positions, int) or len(ropes) > 1 or not isinstance(parameters, Mapping):
        return
    needed: dict[str, tuple[str, ...]] = {"yarn": ("original_max_position_embeddings", "factor")}
    needed |= dict.fromkeys(("linear", "dynamic"), ("factor",))
    kind = parameters.get("rope_type", "default")
    if "type" not in parameters and all(name in parameters for name in needed.get(kind, ())):
        check_length(asked, stretched(parameters, positions))


def _quantization(
    folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Returns the checkpoint's quantization settings, empty for a raw one; None if they are
    elsewhere."""
    settings = raw.get("quantization_config") or text.get("quantization_config") or {}
    lies_elsewhere = "compression_config" in raw or (folder / "hf_quant_config.json").exists()
    return settings if isinstance(settings, Mapping) and (settings or not lies_elsewhere) else None


def _refuse_split(text: Mapping[str, Any], ranks: Ranks) -> None:
    """Checks whether the heads can be split over the ranks, for layers that the model certainly
    has."""
    layers = text.get("layer_types")
    for layer, names in _HEADS.items():
        if isinstance(layers, list) and layer in layers:
            for name in names:
                if isinstance(text.get(name), int):
                    ranks.share(text[name], name)


_HEADS = {
    "full_attention": ("num_attention_heads",),
    "sliding_attention": ("num_attention_heads",),
    "linear_attention": ("linear_num_key_heads", "linear_num_value_heads"),
}
"""Maps a layer type to the settings that must be divisible by the number of ranks."""


def declared_types() -> tuple[str, ...]:
    """Returns the values of `model_types=(...)` in these files, in the order of the registry."""
    types: list[str] = []
    for path in (file for folder in architectures.__path__ for file in _files(folder)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_file = [
            (node.value.lineno, ast.literal_eval(node.value))
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword)
            and node.arg == "model_types"
            and isinstance(node.value, ast.Tuple)
        ]
        types += [name for _, names in sorted(in_file) for name in names]
    return tuple(types)


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("[!_]*.py"))


def unknown_type(model_type: object, known: Iterable[str]) -> UnsupportedModelError:
    """Returns the error for a model type that is not among those known."""
    return UnsupportedModelError(
        f"model_type={model_type!r} is not supported; supported are {', '.join(known)}"
    )
