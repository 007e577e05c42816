"""Reads how a checkpoint is quantised, and decides the form of each projection.

Supported are the official block FP8 (`quant_method` "fp8"), compressed-tensors' FP8, int8 and
four-bit weights, ModelOpt's FP8 and NVFP4, AWQ, GPTQ and AutoRound. Projections that a checkpoint
leaves in the model's dtype stay so: if there are files, their tensors decide; without files (dummy
weights), the configuration's lists do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import ConfigError, UnsupportedModelError
from milepost.layers.quantised import Fp4Precision, Fp8Precision
from milepost.layers.weights import RAW, Precision
from milepost.models.folder import read_object
from milepost.models.quantised import METHODS, is_made_for_fp8_kv, refuse_method
from milepost.models.quantization.compressed import read_compressed
from milepost.models.quantization.methods import (
    read_autoround,
    read_awq,
    read_fp8,
    read_gptq,
    read_modelopt,
)
from milepost.models.quantization.rules import Group, LowPrecision, Rule

SKIPPED = (r".*\.[qkv]_scale$", r".*\.kv_scale$", r".*\.prob_scale$")
"""Scales of attention's operands that are skipped, unless they are KV scales with a place (see
`layers.kv_scales`)."""
_STAY_RAW = re.compile(
    r"(.*\.)?(lm_head|embed_tokens|gate|router|shared_expert_gate|in_proj_(a|b|ba)|[abfg]_(a_|b_)?"
    r"proj|kv_b_proj|dt_proj|x_proj)$"
)
"""Projections that are not rounded on the fly: they are small, and answers depend on them most.
`kv_b_proj` is raw here whatever the checkpoint has."""

NO_FP4_ACTIVATIONS = (
    "fp4_activations: the checkpoint was not made for activations in four bits; leave it out"
)
_SEARCH_S = 10.0
"""Time limit for all projections of a model: a hundred times what any real list takes."""
_MODELOPT_FILE = "hf_quant_config.json"
_READERS = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_autoround,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), read_modelopt),
}
assert tuple(_READERS) == METHODS, "what is said to be read is read"


@dataclass(slots=True)
class Stopwatch:
    """Limits the time spent searching for projections in lists, which are untrusted input."""

    spent_s: float = 0.0
    began_s: float = 0.0

    def __enter__(self) -> None:
        self.began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.monotonic() - self.began_s
        if self.spent_s > _SEARCH_S:
            raise UnsupportedModelError(
                "quantization_config: its lists of layers take more than "
                f"{_SEARCH_S:g} s to search; shorten them"
            )


@dataclass(frozen=True, slots=True)
class Quantization:
    """The forms of a checkpoint's projections."""

    groups: tuple[Group, ...]
    is_left: Rule
    """Whether the configuration leaves a projection in the model's type."""
    names: Container[str] = ()
    """Names of the checkpoint's tensors; empty if there are no files."""
    has_files: bool = False
    watch: Stopwatch = field(default_factory=Stopwatch, compare=False)

    def precision_of(self, path: str) -> Precision:
        """Returns the form of the projection at `path`, or of the experts below it. Raises
        UnsupportedModelError if the configuration's lists take too long to search."""
        with self.watch:
            return self._precision_of(path)

    def _precision_of(self, path: str) -> Precision:
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

    def _holds(self, path: str, examples: Iterable[str], form: LowPrecision) -> bool:
        if isinstance(form, Fp8Precision) and form.strategy == "none":
            return not any(self.is_left(each) for each in (path, *examples))
        candidates = [f"{each}.{marker}" for each in examples for marker in form.markers]
        if isinstance(form, Fp8Precision):
            candidates.append(f"{path}.gate_up_proj_scale_inv")
        return any(name in self.names for name in candidates)


def on_the_fly() -> Quantization:
    """Returns forms for a raw checkpoint whose weights are rounded to FP8 as they are loaded."""
    is_left = lambda path: _STAY_RAW.fullmatch(path) is not None  # noqa: E731
    return Quantization((Group(Fp8Precision(strategy="none")),), is_left, has_files=True)


def quantization_settings(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Returns the configuration's `quantization_config`; empty if it has none. A multimodal
    checkpoint has it in the outer configuration."""
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(config.get_text_config(), "quantization_config", None) or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModelError(f"quantization_config={settings!r} is no object")
    return settings


def read_modelopt_file(folder: Path) -> Mapping[str, Any]:
    """Returns the settings that ModelOpt's older checkpoints keep in a file next to `config.json`;
    empty without that file. Raises ConfigError."""
    path = folder / _MODELOPT_FILE
    if not path.exists():
        return {}
    settings = read_object(path).get("quantization")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: not ModelOpt's configuration: quantization={settings!r}")
    return {"quant_method": "modelopt", **settings}


def has_fp8_kv(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is made for float8 KV. Raises UnsupportedModelError for other KV
    formats."""
    return is_made_for_fp8_kv(quantization_settings(config))


def read_quantization(
    settings: Mapping[str, Any],
    names: Container[str],
    *,
    has_files: bool,
    fp4_activations: bool = False,
) -> Quantization:
    """Returns the forms that `quantization_config` describes; activations have 16 bits where it
    has four-bit ones, unless these are asked for. Raises UnsupportedModelError for settings that
    are not supported."""
    refuse_method(settings)
    groups, is_left = _READERS[settings["quant_method"]](settings)
    if not fp4_activations:
        groups = tuple(_keeping_inputs(group) for group in groups)
    elif not any(isinstance(each.form, Fp4Precision) and each.form.rounds for each in groups):
        raise ConfigError(NO_FP4_ACTIVATIONS)
    return Quantization(groups, is_left, names, has_files)


def _keeping_inputs(group: Group) -> Group:
    """Returns the group with activations that are not rounded to four bits."""
    if not isinstance(group.form, Fp4Precision):
        return group
    return replace(group, form=replace(group.form, rounds=False))
