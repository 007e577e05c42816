"""From a folder or hub id to a model that is ready to run."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from milepost.config import DType, LoadFormat
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.layers.linear import Linear
from milepost.layers.parameters import ParameterKind
from milepost.layers.rotary import run_up_to
from milepost.models.architecture import HEAD, Architecture
from milepost.models.decoder import Decoder
from milepost.models.folder import find_folder
from milepost.models.head import check_head, why_no_head
from milepost.models.quantization import (
    SKIPPED,
    Quantization,
    on_the_fly,
    quantization_settings,
    read_modelopt_file,
    read_quantization,
)
from milepost.models.registry import find_architecture, refuse_layer_types, refuse_unsupported
from milepost.models.weights import WeightFiles, fill_from_files
from milepost.parallel import ALONE, Ranks

logger = logging.getLogger(__name__)

Head = Literal["none", "auto", "mtp"]
Overrides = Mapping[str, Any]
GIB = 2**30
_WEIGHTS_SHARE = 0.8
"""Of what is free, at most, for there to be a cache to speak of."""
_MEMINFO = Path("/proc/meminfo")
"""Where Linux says how much memory can be taken without swapping."""


def load_model(
    model: str | Path,
    *,
    dtype: DType | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    revision: str | None = None,
    head: Head = "none",
    quantization: str | None = None,
    max_model_len: int | None = None,
    overrides: Overrides | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Decoder, PreTrainedConfig]:
    """Load a model and its whole configuration (of a multimodal checkpoint, the outer one).

    `model` is a local folder or a hub id. With `load_format="dummy"` only the configuration is read
    and the weights are filled from `seed`. With `head="mtp"` the model has the checkpoint's MTP
    head; with "auto" too, or a warning says why not. `quantization="fp8"` rounds the weights of a
    raw checkpoint while they are loaded. `max_model_len` is the longest sequence that it is run
    for, which a few models' positions depend on. `overrides` are as `load_config` takes them. Of
    several `ranks`, this one's part is loaded.
    Raises UnsupportedModelError, ConfigError, WeightsError.
    """
    folder = find_folder(model, revision=revision, with_weights=load_format != "dummy")
    config = load_config(folder, overrides)
    plan = _plan(
        folder, config, dtype, device, load_format, head, quantization, max_model_len, ranks
    )
    plan.check_room()
    loaded = plan.decoder().eval()
    if plan.files is None:
        loaded.fill(seed)
    else:
        fill_from_files(loaded, plan.files, plan.skipped)
        if not plan.has_head:
            text = plan.config.get_text_config()
            _note_head(plan.architecture, text, plan.files.by_name)
    logger.info("loaded %s as %s on %s", model, plan.kind.dtype, plan.kind.device)
    return loaded, plan.config


def check_split(
    folder: Path,
    *,
    dtype: DType | torch.dtype,
    load_format: LoadFormat,
    head: Head,
    quantization: str | None,
    overrides: Overrides | None = None,
    ranks: Ranks,
) -> None:
    """Raise ConfigError if the model cannot be split among so many ranks, before anything is
    allocated."""
    config = load_config(folder, overrides)
    plan = _plan(folder, config, dtype, "meta", load_format, head, quantization, None, ranks)
    model = plan.decoder()
    if plan.files is not None:
        model.placements()


def outline(
    folder: Path, *, dtype: DType | torch.dtype = "auto", quantization: str | None = None
) -> Decoder:
    """The model with parameters that have shapes and no memory; needs the folder's `config.json`
    alone. Raises what `load_model` raises."""
    config = load_config(folder)
    plan = _plan(folder, config, dtype, "meta", "dummy", "none", quantization, None, ALONE)
    return plan.decoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is to be loaded."""

    config: PreTrainedConfig
    architecture: Architecture
    kind: ParameterKind
    files: WeightFiles | None
    """None for dummy weights."""
    is_tied: bool
    has_head: bool
    is_quantised: bool
    """By its maker, or on the fly."""
    skipped: tuple[str, ...]
    """Patterns of names of tensors that are left out."""

    def decoder(self) -> Decoder:
        """Unfilled."""
        text = self.config.get_text_config()
        return self.architecture.decoder(
            text, self.kind, is_tied=self.is_tied, has_head=self.has_head
        )

    def check_room(self) -> None:
        """See `check_room`."""
        text = self.config.get_text_config()
        check_room(
            text,
            self.architecture,
            self.kind,
            is_tied=self.is_tied,
            has_head=self.has_head,
            is_quantised=self.is_quantised,
        )


def _plan(
    folder: Path,
    config: PreTrainedConfig,
    dtype: DType | torch.dtype,
    device: str | torch.device,
    load_format: LoadFormat,
    head: Head,
    quantization: str | None,
    max_model_len: int | None,
    ranks: Ranks,
) -> _Plan:
    run_up_to(config.get_text_config(), max_model_len)
    architecture = find_architecture(config.model_type)
    files = None if load_format == "dummy" else WeightFiles(folder)
    names = () if files is None else files.by_name
    forms = _find_forms(config, quantization, names, has_files=files is not None)
    kind = ParameterKind(
        dtype=resolve_dtype(dtype, config),
        device=torch.device(device),
        names=names,
        ranks=ranks,
        **({} if forms is None else {"precision_of": forms.precision_of}),
    )
    has_head = _has_head(head, architecture, config.get_text_config(), kind, files)
    skipped = (*(SKIPPED if forms else ()), *(() if has_head else (rf"{HEAD}\.",)))
    return _Plan(
        config=config,
        architecture=architecture,
        kind=kind,
        files=files,
        # A checkpoint that says it is tied but holds a head of its own means that head.
        is_tied=config.tie_word_embeddings
        and (files is None or "lm_head.weight" not in files.by_name),
        has_head=has_head,
        is_quantised=forms is not None,
        skipped=(*architecture.skipped, *skipped),
    )


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


def _has_head(
    head: Head,
    architecture: Architecture,
    config: PreTrainedConfig,
    kind: ParameterKind,
    files: WeightFiles | None,
) -> bool:
    """Whether the model gets one; raises what `check_head` raises if it is to have one."""
    if head == "mtp":
        check_head(architecture, config, kind, files)
    if head == "auto":
        reason = why_no_head(architecture, config, kind, files)
        if reason:
            logger.warning("no MTP head: %s", reason)
            return False
    return head != "none"


def _note_head(architecture: Architecture, config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Say that a checkpoint's head has been left out."""
    count = sum(name.startswith(f"{HEAD}.") for name in names)
    if not count:
        return
    why = "none was asked for"
    if architecture.head is None:
        why = f"of model_type={config.model_type!r} it is not run"
    logger.info("left out the MTP head, %d tensors under %s: %s", count, HEAD, why)


def check_room(
    config: PreTrainedConfig,
    architecture: Architecture,
    kind: ParameterKind,
    *,
    is_tied: bool,
    has_head: bool = False,
    is_quantised: bool = False,
) -> None:
    """Raise ConfigError if the device has too little free memory for the parameters, before any of
    it is taken."""
    free = _free_bytes(kind.device)
    if free is None:
        return
    # Has the sizes, and no memory.
    outline = replace(kind, device=torch.device("meta"))
    model = architecture.decoder(config, outline, is_tied=is_tied, has_head=has_head)
    if kind.names:
        # Projections whose blocks are not those of their matrix have more scales.
        for module in model.modules():
            if isinstance(module, Linear):
                module.placements()
    needed = model.num_bytes
    if needed > free:
        gc.collect()  # an engine that nobody holds any more may still be there, in cycles
        free = _free_bytes(kind.device) or 0
    if needed > free:
        name = str(kind.dtype).removeprefix("torch.")
        name = "as they are quantised" if is_quantised else f"in {name}"
        advice = _advise(kind, needed, free, is_quantised=is_quantised)
        raise ConfigError(
            f"the weights take {needed / GIB:.1f} GiB {name} and {kind.device} has "
            f"{free / GIB:.1f} GiB free: {(needed - free) / GIB:.1f} GiB are missing; "
            f"{advice}use a smaller model or a device with more memory, or end what else uses it"
        )


def _advise(kind: ParameterKind, needed: int, free: int, *, is_quantised: bool) -> str:
    """What would make the weights smaller, or spread them over more GPUs."""
    advice = ""
    if not is_quantised and kind.dtype.itemsize >= 4:
        advice = "dtype='bfloat16' halves the weights, or "
    elif not is_quantised:
        advice = "quantization='fp8' halves the weights, or "
    if kind.device.type != "cuda":
        return advice
    least = math.ceil(needed * kind.ranks.size / (_WEIGHTS_SHARE * free))
    count = 1 << (least - 1).bit_length()
    return f"{advice}tensor_parallel_size={count} spreads them over as many such GPUs, or "


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can be taken on a device; None where that is not known."""
    if device.type == "cuda":
        gc.collect()  # here also for the pools, which take all that is free
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else None


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


def _find_forms(
    config: PreTrainedConfig, method: str | None, names: Container[str], *, has_files: bool
) -> Quantization | None:
    """The forms of quantised weights; None for a raw checkpoint that stays so."""
    own = quantization_settings(config)
    if not own:
        return None if method is None else on_the_fly(method)
    if method not in (None, own.get("quant_method")):
        raise ConfigError(
            f"quantization={method!r}: the checkpoint is quantised with "
            f"{own.get('quant_method')!r}; leave it out"
        )
    return read_quantization(own, names, has_files=has_files)
