"""Qwen3.5, dense and with experts, alone or with the vision tower of a multimodal checkpoint. It is
like Qwen3-Next, but input projections are separate; with experts, every layer has them, and a
token's weights add up to 1.

Other multimodal models have Qwen3.5 as their text part, which is run without the other parts.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig, PreTrainedConfig, Qwen3_5MoeConfig

from milepost.layers.gated_delta import SEPARATE
from milepost.layers.mtp import MTPHead
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary
from milepost.models.architecture import Architecture, is_unset
from milepost.models.architectures.qwen3_next import (
    QWEN_SPELLINGS,
    expert_shapes,
    qwen_head,
    qwen_parts,
    settle_qwen,
)
from milepost.models.decoder import DecoderParts
from milepost.models.towers import qwen_tower


def _dense(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    return qwen_parts(config, scope, SEPARATE, [None] * config.num_hidden_layers)


def _sparse(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    experts = expert_shapes(config, normalise=True)
    return qwen_parts(config, scope, SEPARATE, [experts] * config.num_hidden_layers)


def _dense_head(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary) -> MTPHead:
    return qwen_head(config, scope, rotary, None)


def _sparse_head(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary) -> MTPHead:
    return qwen_head(config, scope, rotary, expert_shapes(config, normalise=True))


class InternS2PreviewConfig(Qwen3_5MoeConfig):
    """The settings of the text part; those of the other parts are kept and not read."""

    model_type = "intern_s2_preview"


AutoConfig.register("intern_s2_preview", InternS2PreviewConfig, exist_ok=True)

_DENSE = Architecture(
    model_types=("qwen3_5", "qwen3_5_text"),
    build=_dense,
    head=_dense_head,
    tower=qwen_tower,
    requirements={"num_experts": (is_unset, "none: those of model_type='qwen3_5_moe'")},
    spellings=QWEN_SPELLINGS,
    settle=settle_qwen,
)
_SPARSE = Architecture(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    build=_sparse,
    head=_sparse_head,
    tower=qwen_tower,
    spellings=QWEN_SPELLINGS,
    settle=settle_qwen,
)
ARCHITECTURES = (
    _DENSE,
    _SPARSE,
    replace(  # Intern-S2-Preview, with an encoder and a forecaster of time series besides its tower
        _SPARSE,
        model_types=("intern_s2_preview",),
        text_types=("qwen3_5_moe_text",),
        tower=None,
        skipped=(r"(model\.)?time_series\.", r"time_series_forecaster\."),
    ),
    replace(  # MiniCPM-V. No MTP head is published; one would have to be Qwen3.5's.
        _DENSE,
        model_types=("minicpmv4_6", "minicpmv4_7"),
        text_types=("qwen3_5_text",),
        tower=None,
        tower_path="model.vision_tower",
        skipped=(r"model\.(vpm|vit_merger|merger)\.",),
    ),
)
