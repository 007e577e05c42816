"""Qwen3-Next: input projections interleaved by key head, experts in the layers that the
configuration names."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from milepost.layers.attention import Attention
from milepost.layers.gated_delta import INTERLEAVED, Arrangement, GatedDelta
from milepost.layers.mlp import MLP
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.mtp import FIRST_ROW, MTPHead
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, Part
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    Architecture,
    attention_shapes,
    gated_delta_shapes,
    norm_of,
    plain_layer,
)
from milepost.models.decoder import DecoderParts
from milepost.models.names import listed_layers, take_same


def expert_shapes(config: PreTrainedConfig, *, normalise: bool) -> ExpertShapes:
    """Returns the sizes of a layer's mixture."""
    return ExpertShapes(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        normalise=normalise,
    )


def qwen_parts(
    config: PreTrainedConfig,
    scope: ModuleScope,
    arrangement: Arrangement,
    experts: list[ExpertShapes | None],
) -> DecoderParts:
    """Builds layers: gated attention or Gated DeltaNet, then experts or (None) an MLP, with
    zero-centred norms before both."""
    rotary, layers = Rotary(config, scope.device), []
    for index, (layer_type, shapes) in enumerate(zip(config.layer_types, experts, strict=True)):
        inner = scope.under(f"layers.{index}")
        mixer: Part
        if layer_type == "full_attention":
            mixer = _attention(config, inner, rotary)
        else:
            mixer = GatedDelta(gated_delta_shapes(config), inner.under("linear_attn"), arrangement)
        layers.append(_layer(config, inner, mixer, shapes))
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("norm"), offset=1.0))


def qwen_head(
    config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary, experts: ExpertShapes | None
) -> MTPHead:
    """Builds the head. Its layer is one of the model's attention layers, or a dense one if the
    checkpoint's head is dense."""
    inner = scope.under("layers.0")
    experts = None if inner.has_projection("mlp.gate_proj") else experts
    layer = _layer(config, inner, _attention(config, inner, rotary, first_row=FIRST_ROW), experts)
    return MTPHead(config.hidden_size, layer, scope, eps=config.rms_norm_eps, offset=1.0)


def _attention(
    config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary, *, first_row: int = 0
) -> Attention:
    shapes = attention_shapes(
        config, norm="each", norm_offset=1.0, gate="entries", first_row=first_row
    )
    return Attention(shapes, scope.under("self_attn"), rotary=rotary)


def _layer(
    config: PreTrainedConfig, scope: ModuleScope, mixer: Part, experts: ExpertShapes | None
) -> Layer:
    size, mlp_scope = config.hidden_size, scope.under("mlp")
    mlp = (
        MLP(size, config.intermediate_size, mlp_scope)
        if experts is None
        else MoE(size, experts, mlp_scope)
    )
    return plain_layer(config, scope, mixer, mlp, offset=1.0)


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    shapes = expert_shapes(config, normalise=config.norm_topk_prob)
    experts = [
        shapes
        if config.num_experts > 0
        and index not in config.mlp_only_layers
        and (index + 1) % config.decoder_sparse_step == 0
        else None
        for index in range(config.num_hidden_layers)
    ]
    return qwen_parts(config, scope, INTERLEAVED, experts)


def _head(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary) -> MTPHead:
    shapes = expert_shapes(config, normalise=config.norm_topk_prob)
    return qwen_head(config, scope, rotary, shapes if config.num_experts > 0 else None)


def settle_qwen(settings: dict[str, Any]) -> None:
    """Converts `full_attention_interval` to a list of layer types; merges the head's two setting
    names."""
    name, other = QWEN_SPELLINGS[1]
    take_same({name: settings.get(name)}, name, other, settings.get(other))
    interval = settings.pop("full_attention_interval", None)
    count = settings.get("num_hidden_layers")
    if interval is None or not isinstance(count, int):
        return
    indices = range(interval - 1, count, interval)
    layers = listed_layers(settings, list(indices), "full_attention_interval", "linear_attention")
    take_same(settings, "layer_types", f"full_attention_interval={interval}", layers)


QWEN_SPELLINGS = (
    ("layer_types", "full_attention_interval"),
    ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
)

ARCHITECTURES = (
    Architecture(
        model_types=("qwen3_next",),
        build=_parts,
        head=_head,
        spellings=QWEN_SPELLINGS,
        settle=settle_qwen,
    ),
)
