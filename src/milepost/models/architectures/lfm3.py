"""LFM3: gated short convolutions, full attention, and attention to a sliding window with rotary
positions of its own; a gate a head, and norms before and after each block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, Lfm2Config, PreTrainedConfig

from milepost.layers.attention import Attention
from milepost.layers.mlp import MLP
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, Part, ResidualBlock
from milepost.layers.rotary import Rotary
from milepost.layers.short_conv import ShortConv
from milepost.models.architecture import Architecture, attention_shapes, is_unset
from milepost.models.decoder import DecoderParts
from milepost.models.towers import lfm3_tower

_GATE_UP_DOWN = "w1", "w3", "w2"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotaries = {
        layer_type: Rotary(config, scope.device, layer_type)
        for layer_type in (_FULL, _SLIDING)
        if layer_type in config.layer_types
    }
    layers, last = [], None
    for index, layer_type in enumerate(config.layer_types):
        inner, rotary = scope.under(f"layers.{index}"), rotaries.get(layer_type)
        layer, last = _layer(config, inner, rotary, layer_type, last)
        layers.append(layer)
    return DecoderParts(layers=layers, norm=_norm(config, scope.under("embedding_norm"), last))


def _layer(
    config: PreTrainedConfig,
    scope: ModuleScope,
    rotary: Rotary | None,
    layer_type: str,
    before: RMSNorm | None,
) -> tuple[Layer, RMSNorm | None]:
    """Returns a layer, and the norm of its output, which whatever reads the output applies;
    `before` is that of the layer before."""
    size = config.hidden_size
    posts: list[RMSNorm | None] = [None, None]
    if config.use_sandwich_norm:
        posts = [_norm(config, scope.under(f"post_{name}_norm")) for name in ("operator", "ffn")]
    mixer: Part
    if layer_type == "conv":
        # What a window reads is kept with states alone, not at every page boundary.
        options = {"bias": config.conv_bias, "in_slots": _has_windows(config)}
        mixer = ShortConv(size, config.conv_L_cache, scope.under("conv"), **options)
    else:
        mixer = _attention(config, scope.under("self_attn"), rotary, layer_type)
    feed_forward = MLP(size, config.intermediate_size, scope.under("feed_forward"), _GATE_UP_DOWN)
    layer = Layer(
        ResidualBlock(mixer, pre=_norm(config, scope.under("operator_norm"), before)),
        ResidualBlock(feed_forward, pre=_norm(config, scope.under("ffn_norm"), posts[0])),
    )
    return layer, posts[1]


def _attention(
    config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary | None, layer_type: str
) -> Attention:
    is_sliding = layer_type == _SLIDING and _has_windows(config)
    shapes = attention_shapes(
        config,
        norm="each",
        gate="heads" if config.use_attention_gate else "none",
        window=config.sliding_window if is_sliding else None,
    )
    return Attention(shapes, scope, rotary=rotary)


def _has_windows(config: PreTrainedConfig) -> bool:
    """Whether layers have windows, and these are not switched off."""
    is_off = getattr(config, "use_sliding_window", None) is False or not config.sliding_window
    return _SLIDING in config.layer_types and not is_off


def _norm(
    config: PreTrainedConfig, scope: ModuleScope, of_output: RMSNorm | None = None
) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, scope, of_output=of_output)


class Lfm3OwnConfig(Lfm2Config):
    """The configuration where transformers has none, with the published sizes as defaults."""

    model_type = "lfm3"
    attribute_map: ClassVar[dict[str, str]] = {"rms_norm_eps": "norm_eps"}
    _rope_type_labels: ClassVar[tuple[str, ...]] = (_FULL, _SLIDING)
    vocab_size: int = 128_000
    hidden_size: int = 2048
    intermediate_size: int = 7680
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    conv_L_cache: int = 7  # noqa: N815  the published name
    sliding_window: int | None = 256
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    attention_bias: bool = False

    def __post_init__(self, **others: Any) -> None:
        full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        ropes = {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
        self.rope_parameters = self.rope_parameters or ropes
        places = range(self.num_hidden_layers)
        kinds = [{2: _FULL, 0: _SLIDING}.get(place % 4, "conv") for place in places]
        self.layer_types = self.layer_types or ["conv", *kinds[1:]]
        Lfm2Config.__post_init__(self, **others)


if "lfm3" not in CONFIG_MAPPING:
    AutoConfig.register("lfm3", Lfm3OwnConfig)
_PLAIN = Architecture(
    model_types=("lfm3",),
    build=_parts,
    layer_types=(_FULL, _SLIDING, "conv"),
    aliases={"rms_norm_eps": "norm_eps"},
    requirements={
        "attention_bias": (is_unset, "false"),
        "hidden_act": (lambda value: value in (None, "silu", "swish"), "silu"),
        "use_sliding_window": (lambda value: value in (None, True, False), "true or false"),
    },
)
ARCHITECTURES = (
    _PLAIN,
    replace(
        _PLAIN,
        model_types=("lfm3_vl",),
        text_types=("lfm3",),
        tower=lfm3_tower,
        tower_path="model.vision_tower",
        skipped=(r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\."),
    ),
)
