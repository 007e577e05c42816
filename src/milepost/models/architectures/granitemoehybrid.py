"""Granite 4: Mamba2 layers and attention, with rotary positions or none; after each a feed-forward,
or experts and a shared one. Each layer's output has a multiplier, as have embeddings and logits."""

from __future__ import annotations

from transformers import PreTrainedConfig

from milepost.kernels.products import Scores
from milepost.layers.attention import Attention
from milepost.layers.experts import ExpertNames
from milepost.layers.mamba2 import Mamba2
from milepost.layers.mlp import MLP
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Part
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    Architecture,
    attention_shapes,
    mamba2_shapes,
    norm_of,
    only,
    plain_layer,
)
from milepost.models.decoder import DecoderParts

_SHARED = "input_linear", "input_linear", "output_linear"
_EXPERTS = "block_sparse_moe"
_PUBLISHED = ExpertNames(
    router=f"{_EXPERTS}.router.layer",
    stacked=(f"{_EXPERTS}.input_linear.weight", f"{_EXPERTS}.output_linear.weight"),
    shared="shared_mlp",
    shared_projections=_SHARED,
)
_TRANSFORMERS = ExpertNames(
    router=f"{_EXPERTS}.router",
    single=f"{_EXPERTS}.experts",
    stacked=(f"{_EXPERTS}.experts.gate_up_proj", f"{_EXPERTS}.experts.down_proj"),
    shared="shared_mlp",
    shared_projections=_SHARED,
)


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotary = Rotary(config, scope.device) if config.position_embedding_type == "rope" else None
    attention = attention_shapes(config, scale=config.attention_multiplier)
    # A norm multiplies the block's output before it, before adding that to the residual stream.
    options = {"multiplier": config.residual_multiplier}
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        mixer = (
            Attention(attention, inner.under("self_attn"), rotary=rotary)
            if layer_type == "full_attention"
            else Mamba2(mamba2_shapes(config), inner.under("mamba"))
        )
        layers.append(plain_layer(config, inner, mixer, _feed_forward(config, inner), **options))
    return DecoderParts(
        layers=layers,
        norm=norm_of(config, scope.under("norm"), **options),
        embedding_multiplier=config.embedding_multiplier,
        logits_multiplier=1 / config.logits_scaling,
    )


def _feed_forward(config: PreTrainedConfig, scope: ModuleScope) -> Part:
    if not config.num_local_experts:
        size, mlp_scope = config.shared_intermediate_size, scope.under("shared_mlp")
        return MLP(config.hidden_size, size, mlp_scope, _SHARED)
    shapes = ExpertShapes(
        num_experts=config.num_local_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.intermediate_size,
        shared_size=config.shared_intermediate_size,
        normalise=True,
        scores=Scores(gates_shared=False),
    )
    names = _TRANSFORMERS if scope.has(f"{_TRANSFORMERS.router}.weight") else _PUBLISHED
    return MoE(config.hidden_size, shapes, scope, names)


ARCHITECTURES = (
    Architecture(
        model_types=("granitemoehybrid",),
        build=_parts,
        layer_types=("full_attention", "linear_attention", "attention", "mamba"),
        aliases={"layers_block_type": "layer_types"},
        requirements={
            **only(normalization_function="rmsnorm"),
            "position_embedding_type": (
                lambda value: value in (None, "nope", "rope"),
                "none, nope or rope",
            ),
        },
    ),
)
