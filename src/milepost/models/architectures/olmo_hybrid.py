"""OLMo-Hybrid: attention with norms after it and none before, and query and key norms across all
heads; Gated DeltaNet with norms before it and betas up to 2; rotary positions or none at all.

Checkpoints come in two dialects: OLMo-core's names with one convolution for each of q, k and v, or
transformers'.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from milepost.layers.attention import Attention
from milepost.layers.gated_delta import BY_LETTER, GatedDelta
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, ResidualBlock
from milepost.layers.rotary import Rotary
from milepost.models.architecture import Architecture, attention_shapes, gated_delta_shapes, norm_of
from milepost.models.decoder import DecoderParts

_GATED_NORM_EPS = 1e-5
"""Epsilon of FLA's own layers; no setting defines it."""
_OLMO_CORE_NAMES = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    has_positions = (config.rope_parameters or {}).get("rope_theta") is not None
    rotary = Rotary(config, scope.device) if has_positions else None
    layers = [
        _attention(config, scope.under(f"layers.{index}"), rotary)
        if layer_type == "full_attention"
        else _recurrent(config, scope.under(f"layers.{index}"))
        for index, layer_type in enumerate(config.layer_types)
    ]
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("norm")))


def _attention(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary | None) -> Layer:
    shapes = attention_shapes(config, norm="whole")
    return Layer(
        ResidualBlock(
            Attention(shapes, scope.under("self_attn"), rotary=rotary),
            post=norm_of(config, _in_dialect(scope, "post_attention_layernorm")),
        ),
        ResidualBlock(
            _mlp(config, scope), post=norm_of(config, scope.under("post_feedforward_layernorm"))
        ),
    )


def _recurrent(config: PreTrainedConfig, scope: ModuleScope) -> Layer:
    shapes = gated_delta_shapes(
        config,
        norm_eps=_GATED_NORM_EPS,
        max_beta=2.0 if config.linear_allow_neg_eigval else 1.0,
    )
    mixer = GatedDelta(shapes, scope.under("linear_attn"), BY_LETTER)
    return Layer(
        ResidualBlock(mixer, pre=norm_of(config, _in_dialect(scope, "input_layernorm"))),
        ResidualBlock(
            _mlp(config, scope), pre=norm_of(config, _in_dialect(scope, "post_attention_layernorm"))
        ),
    )


def _in_dialect(scope: ModuleScope, name: str) -> ModuleScope:
    """Returns the path of the norm that transformers calls `name`. transformers' own saving renames
    it in every layer."""
    other = _OLMO_CORE_NAMES[name]
    return scope.under(other if scope.has(f"{other}.weight") else name)


def _mlp(config: PreTrainedConfig, scope: ModuleScope) -> MLP:
    return MLP(config.hidden_size, config.intermediate_size, scope.under("mlp"))


ARCHITECTURES = (Architecture(model_types=("olmo_hybrid",), build=_parts),)
