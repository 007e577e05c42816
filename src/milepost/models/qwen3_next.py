"""Qwen3-Next: input projections interleaved by key head, experts in the layers that the
configuration names."""

from __future__ import annotations

from transformers import PreTrainedConfig

from milepost.layers.gated_delta import place_interleaved
from milepost.layers.moe import ExpertShapes
from milepost.models.hybrid import Architecture


def _experts_of_layer(config: PreTrainedConfig, index: int) -> ExpertShapes | None:
    is_sparse = (
        config.num_experts > 0
        and index not in config.mlp_only_layers
        and (index + 1) % config.decoder_sparse_step == 0
    )
    if not is_sparse:
        return None
    return ExpertShapes(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        normalise=config.norm_topk_prob,
    )


QWEN3_NEXT = Architecture(
    model_types=("qwen3_next",),
    place_projection=place_interleaved,
    experts_of_layer=_experts_of_layer,
)
