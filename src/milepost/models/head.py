"""Decides whether a checkpoint has an MTP head that can run here, and if not, why.

The decision needs only names, shapes and dtypes of the tensors, and comes before any allocation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from milepost.errors import MilepostError, UnsupportedModelError
from milepost.layers.moe import elsewhere_of
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import Holder, merge
from milepost.models.architecture import Architecture
from milepost.models.weights import WeightFiles

_DEPTHS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def depth_of(config: PreTrainedConfig) -> int:
    """Returns the number of the head's layers in a text configuration; 1 if it does not say."""
    depths = [getattr(config, name, None) for name in _DEPTHS]
    return next((int(depth) for depth in depths if depth is not None), 1)


def check_head(
    architecture: Architecture,
    config: PreTrainedConfig,
    scope: ModuleScope,
    files: WeightFiles | None,
) -> None:
    """Raises UnsupportedModelError or WeightsError if the head cannot run, naming the setting or
    the tensor. Without `files`, weights are dummies."""
    if architecture.head is None:
        raise UnsupportedModelError(f"model_type={config.model_type!r} has no MTP head")
    depth = depth_of(config)
    if depth != 1:
        name = next(name for name in _DEPTHS if getattr(config, name, None) is not None)
        raise UnsupportedModelError(f"{name}={depth} is not supported; supported is 1")
    if getattr(config, "mtp_use_dedicated_embeddings", None):
        raise UnsupportedModelError(
            "mtp_use_dedicated_embeddings=True is not supported; supported is false"
        )
    if files is not None:
        outline = architecture.head_of(config, replace(scope, device=torch.device("meta")))
        holders = (module for module in outline.modules() if isinstance(module, Holder))
        placements = merge(holder.placements() for holder in holders)
        files.check(placements, f"{architecture.head_path(config)}.", elsewhere_of(outline))


def why_no_head(
    architecture: Architecture,
    config: PreTrainedConfig,
    scope: ModuleScope,
    files: WeightFiles | None,
) -> str:
    """Returns the message of `check_head`'s error; empty if the head can run."""
    try:
        check_head(architecture, config, scope, files)
    except MilepostError as error:
        return str(error)
    return ""
