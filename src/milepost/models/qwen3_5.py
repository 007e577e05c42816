"""Qwen3.5, dense and with experts, alone or as the text part of a multimodal checkpoint.

Input projections are separate matrices; with experts, every layer has them, and a token's weights
add up to 1.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from milepost.layers.gated_delta import place_separate
from milepost.layers.moe import ExpertShapes
from milepost.models.hybrid import Architecture


def _no_experts(config: PreTrainedConfig, index: int) -> None:  # noqa: ARG001
    return None


def _experts_of_layer(config: PreTrainedConfig, index: int) -> ExpertShapes:  # noqa: ARG001
    return ExpertShapes(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        normalise=True,
    )


QWEN3_5 = Architecture(
    model_types=("qwen3_5", "qwen3_5_text"),
    place_projection=place_separate,
    experts_of_layer=_no_experts,
)

QWEN3_5_MOE = Architecture(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    place_projection=place_separate,
    experts_of_layer=_experts_of_layer,
)
