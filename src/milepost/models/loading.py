"""Loads a checkpoint's folder into a model that is ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedConfig

from milepost.config import DType, LoadFormat
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.parameters import ModuleScope, raw_precision
from milepost.layers.rotary import run_up_to
from milepost.models.architecture import Architecture
from milepost.models.decoder import Decoder
from milepost.models.folder import reading
from milepost.models.head import check_head, why_no_head
from milepost.models.quantised import refuse_asked
from milepost.models.quantization import (
    NO_FP4_ACTIVATIONS,
    SKIPPED,
    Quantization,
    on_the_fly,
    quantization_settings,
    read_quantization,
)
from milepost.models.registry import Overrides, find_architecture, load_config, resolve_dtype
from milepost.models.room import check_room
from milepost.models.weights import DERIVED, WeightFiles, fill_from_files
from milepost.parallel import ALONE, Ranks

logger = logging.getLogger(__name__)

_OF_QUANTISED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""Tensors that belong to a quantised weight or replace it."""

Head = Literal["none", "auto", "mtp"]
META = torch.device("meta")
"""Device of parameters that have shapes but no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a checkpoint."""

    dtype: DType | torch.dtype = "auto"
    device: str | torch.device = "cpu"
    load_format: LoadFormat = "auto"
    """`dummy` reads only the configuration and fills weights from `seed`."""
    seed: int = 0
    head: Head = "none"
    """Whether to load the checkpoint's MTP head: `auto` loads it if it can run, and warns
    otherwise."""
    has_tower: bool = False
    """Whether to load the vision tower of a checkpoint that has one."""
    quantization: str | None = None
    """`fp8` rounds the weights of a raw checkpoint as they are loaded."""
    fp4_activations: bool = False
    """Whether activations are rounded to four bits where the checkpoint was made for that."""
    max_model_len: int | None = None
    """Length of the longest sequence that the model is run for; the positions of a few models
    depend on it."""
    overrides: Overrides | None = None
    """Overrides of settings, as `load_config` takes them."""
    batch_invariant: bool = False
    """Whether a row's results must not depend on the other rows of a step."""
    ranks: Ranks = field(default=ALONE)
    """The ranks that the model is split over; only this rank's part is loaded."""


def load_model(
    folder: Path, options: LoadOptions | None = None
) -> tuple[Decoder, PreTrainedConfig]:
    """Loads a model and its whole configuration (the outer one for a multimodal checkpoint).

    Raises UnsupportedModelError, ConfigError, WeightsError.
    """
    options = options or LoadOptions()
    with reading(folder):
        plan = _plan(folder, options)
        outline = plan.outline()
    check_room(outline, plan.scope, is_quantised=plan.is_quantised)
    loaded = plan.decoder().eval()
    if plan.files is None:
        loaded.fill(plan.seed)
    else:
        fill_from_files(loaded, plan.files, plan.skipped)
        if not plan.has_head:
            text = plan.config.get_text_config()
            _note_head(plan.architecture, text, plan.files.by_name)
    logger.info("loaded %s as %s on %s", folder, plan.scope.dtype, plan.scope.device)
    return loaded, plan.config


def has_pictures(config: PreTrainedConfig) -> bool:
    """Whether a model of this whole configuration takes pictures, if its tower is loaded."""
    has_part = getattr(config, "vision_config", None) is not None
    return has_part and find_architecture(config.model_type).tower is not None


def check_split(folder: Path, options: LoadOptions) -> None:
    """Raises ConfigError if the model cannot be split over `options.ranks`, before anything is
    allocated."""
    with reading(folder):
        plan = _plan(folder, options)
        model = plan.outline()
        if plan.files is not None:
            model.placements()


def check_quantization(config: PreTrainedConfig, options: LoadOptions) -> None:
    """Raises ConfigError for a quantization that is not supported, or not with these options; reads
    no weights."""
    with reading("config.json"):
        _find_forms(config, options, (), has_files=False)


def outline(folder: Path, options: LoadOptions | None = None) -> tuple[Decoder, PreTrainedConfig]:
    """Returns the model with parameters that have shapes but no memory, and its whole
    configuration. It needs only the folder's `config.json`. Raises the errors of `load_model`."""
    with reading(folder):
        plan = _plan(folder, replace(options or LoadOptions(), load_format="dummy"))
        return plan.outline(), plan.config
    raise AssertionError("an error is raised again")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that is decided before a model is built."""

    config: PreTrainedConfig
    architecture: Architecture
    scope: ModuleScope
    files: WeightFiles | None
    """The checkpoint's files; None for dummy weights, which are filled from `seed`."""
    seed: int
    is_tied: bool
    has_head: bool
    has_tower: bool
    is_quantised: bool
    """Whether weights are quantised, in the checkpoint or on the fly."""
    skipped: tuple[str, ...]
    """Patterns of the names of tensors that are skipped."""

    def decoder(self) -> Decoder:
        """Returns the unfilled model."""
        return self._decoder(self.scope)

    def outline(self) -> Decoder:
        """Returns the model with parameters that have shapes but no memory."""
        return self._decoder(replace(self.scope, device=META))

    def _decoder(self, scope: ModuleScope) -> Decoder:
        text = self.config.get_text_config()
        return self.architecture.decoder(
            text,
            scope,
            is_tied=self.is_tied,
            has_head=self.has_head,
            whole=self.config if self.has_tower else None,
        )


def _plan(folder: Path, options: LoadOptions) -> _Plan:
    config = load_config(folder, options.overrides)
    text = config.get_text_config()
    run_up_to(text, options.max_model_len)
    architecture = find_architecture(config.model_type)
    files = None if options.load_format == "dummy" else WeightFiles(folder)
    names = () if files is None else files.by_name
    _check_embedding(architecture, names)
    forms = _find_forms(config, options, names, has_files=files is not None)
    scope = ModuleScope(
        dtype=resolve_dtype(options.dtype, config),
        device=torch.device(options.device),
        names=names,
        ranks=options.ranks,
        order=SumOrder.FIXED if options.batch_invariant else SumOrder.FREE,
        precision_of=raw_precision if forms is None else forms.precision_of,
    )
    has_head = _has_head(options.head, architecture, text, scope, files)
    has_tower = options.has_tower and has_pictures(config)
    without: tuple[str, ...] = () if has_tower else (rf"{re.escape(architecture.tower_path)}\.",)
    without += () if has_head else (rf"{re.escape(architecture.head_path(text))}\.",)
    has_output = scope.under(architecture.output_path).has_projection("lm_head")
    return _Plan(
        config=config,
        architecture=architecture,
        scope=scope,
        files=files,
        seed=options.seed,
        # A checkpoint that says it is tied but has its own head means that head.
        is_tied=config.tie_word_embeddings and not has_output,
        has_head=has_head,
        has_tower=has_tower,
        is_quantised=forms is not None,
        skipped=(*architecture.skipped, *DERIVED, *(SKIPPED if forms else ()), *without),
    )


def _check_embedding(architecture: Architecture, names: Container[str]) -> None:
    """Raises UnsupportedModelError if the embedding is quantised: its rows are looked up, not
    multiplied."""
    for prefix in architecture.prefixes:
        for marker in _OF_QUANTISED:
            name = f"{prefix}.{architecture.embedding}.{marker}"
            if name in names:
                raise UnsupportedModelError(
                    f"tensor {name!r}: quantised embeddings are not supported; use a checkpoint "
                    "that keeps them in bfloat16, as most do"
                )


def _has_head(
    head: Head,
    architecture: Architecture,
    config: PreTrainedConfig,
    scope: ModuleScope,
    files: WeightFiles | None,
) -> bool:
    """Whether the model gets a head. Raises the errors of `check_head` if a head is required."""
    if head == "mtp":
        check_head(architecture, config, scope, files)
    if head == "auto":
        reason = why_no_head(architecture, config, scope, files)
        if reason:
            logger.warning("no MTP head: %s", reason)
            return False
    return head != "none"


def _note_head(architecture: Architecture, config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Logs that a checkpoint's head has been skipped, if it has one."""
    path = architecture.head_path(config)
    count = sum(name.startswith(f"{path}.") for name in names)
    if not count:
        return
    why = "none was asked for"
    if architecture.head is None:
        why = f"of model_type={config.model_type!r} it is not run"
    logger.info("left out the MTP head, %d tensors under %s: %s", count, path, why)


def _find_forms(
    config: PreTrainedConfig, options: LoadOptions, names: Container[str], *, has_files: bool
) -> Quantization | None:
    """Returns the forms of quantised weights; None for a raw checkpoint that stays raw."""
    settings, asks = quantization_settings(config), options.fp4_activations
    refuse_asked(settings, options.quantization)
    if settings:
        return read_quantization(settings, names, has_files=has_files, fp4_activations=asks)
    if asks:
        raise ConfigError(NO_FP4_ACTIVATIONS)
    return None if options.quantization is None else on_the_fly()
