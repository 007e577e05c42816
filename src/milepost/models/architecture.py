"""The declaration that each file of `architectures` makes, and helpers for configurations."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.kernels.products import Scores
from milepost.layers.attention import AttentionShapes
from milepost.layers.gated_delta import GatedDeltaShapes
from milepost.layers.kda import KDAShapes
from milepost.layers.mamba2 import Mamba2Shapes
from milepost.layers.mla import MLAShapes
from milepost.layers.moe import ExpertShapes
from milepost.layers.mtp import MTPHead
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, Part, ResidualBlock
from milepost.layers.rotary import Rotary
from milepost.layers.tower import Tower
from milepost.models.decoder import Decoder, DecoderParts

Requirement = tuple[Callable[[Any], bool], str]
"""A test for the values of a setting that are supported, and these values in words."""


def is_unset(value: Any) -> bool:
    """Whether a setting is missing or false."""
    return not value


def is_true_or_unset(value: Any) -> bool:
    """Whether a setting is missing or true."""
    return value in (None, True)


def only(**values: Any) -> dict[str, Requirement]:
    """Returns requirements of settings that are missing or have these values."""

    def requirement(wanted: Any) -> Requirement:
        return lambda value: value in (None, wanted), str(wanted).lower()

    return {name: requirement(wanted) for name, wanted in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of models. A file registers its models by listing them in `ARCHITECTURES`."""

    model_types: tuple[str, ...]
    """`model_type` of the configurations, or of the text part of multimodal ones."""
    text_types: tuple[str, ...] = ()
    """`model_type` of a text part that is another family's; the first one if it does not say."""
    build: Callable[[PreTrainedConfig, ModuleScope], DecoderParts]
    """Builds the layers of a text configuration; their tensors are under `scope.path`."""
    layer_types: tuple[str, ...] = ("full_attention", "linear_attention")
    """Layer types that `build` supports."""
    requirements: Mapping[str, Requirement] = field(default_factory=dict)
    """Settings to check besides those that are checked for every model (see `registry`)."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps other names of settings to the configuration class's; `a.b` is b in the object a."""
    spellings: tuple[tuple[str, ...], ...] = ()
    """Groups of settings that express one thing in different ways: an override of one replaces
    all."""
    settle: Callable[[dict[str, Any]], None] | None = None
    """Converts such settings of a text part to those of the configuration class, in place. Raises
    ConfigError if they contradict each other."""
    prefixes: tuple[str, ...] = ("model.language_model", "model")
    """Paths that the text model may have in a checkpoint; the first with an embedding is used."""
    embedding: str = "embed_tokens"
    output_path: str = ""
    """Path of the module with the output projection `lm_head`; empty for the top level."""
    head: Callable[[PreTrainedConfig, ModuleScope, Rotary], MTPHead] | None = None
    """Builds the MTP head, with tensors under `scope.path` and the model's rotary embedding; None
    if the family has none."""
    head_at: str = "mtp"
    """Path of the head's tensors, at the top level of multimodal checkpoints too. `{depth}` stands
    for the number of the model's layers."""
    tower: Callable[[PreTrainedConfig, ModuleScope], Tower] | None = None
    """Builds the vision tower of a whole configuration, with tensors under `scope.path`; None if
    the family has no tower that is supported."""
    tower_path: str = "model.visual"
    """Path of the tower's tensors. They are skipped unless it is asked for, as the head's are."""
    skipped: tuple[str, ...] = ()
    """Patterns of tensors that are skipped on purpose, matched from the beginning of the name."""

    def decoder(
        self,
        config: PreTrainedConfig,
        scope: ModuleScope,
        *,
        is_tied: bool,
        has_head: bool = False,
        whole: PreTrainedConfig | None = None,
    ) -> Decoder:
        """Returns an unfilled model; `scope` is that of the whole checkpoint. It gets a tower if
        there is a `whole` configuration."""
        inner = scope.under(self._prefix(scope.names))
        parts = self.build(config, inner)
        if whole is not None:
            parts = replace(parts, tower=self.tower_of(whole, scope))
        if has_head:
            parts = replace(parts, head=self.head_of(config, scope, rotary_of(parts.layers)))
        output = inner.root().under(self.output_path)
        return Decoder(
            config, parts, inner, is_tied=is_tied, embedding=self.embedding, output=output
        )

    def head_of(
        self, config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary | None = None
    ) -> MTPHead:
        """Returns the unfilled head alone."""
        assert self.head is not None, "only architectures that have heads are asked for one"
        rotary = rotary or Rotary(config, scope.device)
        return self.head(config, scope.root().under(self.head_path(config)), rotary)

    def head_path(self, config: PreTrainedConfig) -> str:
        """Returns the path of the head's tensors."""
        return self.head_at.format(depth=config.num_hidden_layers)

    def tower_of(self, whole: PreTrainedConfig, scope: ModuleScope) -> Tower:
        """Returns the unfilled tower alone. It is not split: each rank has all of it."""
        assert self.tower is not None, "only architectures that have towers are asked for one"
        plain = ModuleScope(dtype=scope.dtype, device=scope.device, names=scope.names)
        return self.tower(whole, plain.under(self.tower_path))

    def _prefix(self, names: Container[str]) -> str:
        matching = (each for each in self.prefixes if f"{each}.{self.embedding}.weight" in names)
        return next(matching, self.prefixes[-1])


def rotary_of(layers: Iterable[Layer]) -> Rotary | None:
    """Returns the first rotary embedding that the layers use, if any."""
    parts = (part for layer in layers for part in layer.parts)
    return next((part.rotary for part in parts if part.rotary is not None), None)


def norm_of(
    config: PreTrainedConfig, scope: ModuleScope, *, eps: float | None = None, **others: Any
) -> RMSNorm:
    """Returns a norm of the residual stream."""
    eps = config.rms_norm_eps if eps is None else eps
    return RMSNorm(config.hidden_size, eps, scope, **others)


NORMS = "input_layernorm", "post_attention_layernorm"


def plain_layer(
    config: PreTrainedConfig,
    scope: ModuleScope,
    *parts: Part,
    norms: tuple[str, str] = NORMS,
    **options: Any,
) -> Layer:
    """Returns a layer of one mixer, or of several side by side, and a feed-forward, with a norm
    before each; `options` are those of the norms."""
    first, second = (norm_of(config, scope.under(name), **options) for name in norms)
    return Layer(ResidualBlock(*parts[:-1], pre=first), ResidualBlock(parts[-1], pre=second))


def attention_shapes(config: PreTrainedConfig, **others: Any) -> AttentionShapes:
    """Returns attention sizes from the setting names that most configurations use."""
    head_dim = getattr(config, "head_dim", None)
    names = {"norm_eps": "rms_norm_eps", "bias": "attention_bias"}
    read = {key: getattr(config, name) for key, name in names.items() if key not in others}
    return AttentionShapes(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        **read,
        **others,
    )


def gated_delta_shapes(config: PreTrainedConfig, **others: Any) -> GatedDeltaShapes:
    """Returns Gated DeltaNet sizes from the setting names that most configurations use."""
    return GatedDeltaShapes(
        hidden_size=config.hidden_size,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        **{"norm_eps": config.rms_norm_eps} | others,
    )


def mamba2_shapes(config: PreTrainedConfig, **others: Any) -> Mamba2Shapes:
    """Returns Mamba2 sizes from the setting names that most configurations use."""
    return Mamba2Shapes(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        conv_width=config.mamba_d_conv,
        chunk_size=config.mamba_chunk_size,
        norm_eps=config.rms_norm_eps,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        time_step_limit=tuple(config.time_step_limit),
        **others,
    )


def kda_shapes(config: PreTrainedConfig, **others: Any) -> KDAShapes:
    """Returns sizes of Kimi Delta Attention from the setting names that transformers uses."""
    return KDAShapes(
        hidden_size=config.hidden_size,
        num_heads=config.linear_num_heads,
        head_dim=config.linear_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
        **others,
    )


def latent_shapes(config: PreTrainedConfig, **others: Any) -> MLAShapes:
    """Returns sizes of latent attention from the setting names that most configurations use."""
    return MLAShapes(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        latent_dim=config.kv_lora_rank,
        own_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        **others,
    )


def grouped_shapes(config: PreTrainedConfig, **others: Any) -> ExpertShapes:
    """Returns sizes of a mixture with DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2):
    corrected sigmoids, experts of the best groups, and shared ones without a gate."""
    scores = Scores(
        kind="sigmoid",
        num_groups=config.n_group,
        num_groups_chosen=config.topk_group,
        norm_eps=1e-20,
        scale=config.routed_scaling_factor,
        gates_shared=False,
    )
    size = config.moe_intermediate_size
    shared_size = getattr(config, "moe_shared_expert_intermediate_size", None) or size
    return ExpertShapes(
        num_experts=config.num_local_experts,
        num_chosen=config.num_experts_per_tok,
        size=size,
        shared_size=shared_size * config.n_shared_experts,
        normalise=config.norm_topk_prob,
        scores=scores,
        has_bias=True,
        **others,
    )


def refuse_uneven(config: PreTrainedConfig, many: str, few: str) -> None:
    """Raises UnsupportedModelError if one number of heads is not a multiple of the other."""
    if getattr(config, many, 0) % getattr(config, few, 1):
        raise UnsupportedModelError(
            f"{many}={getattr(config, many)} is not a multiple of {few}={getattr(config, few)}"
        )
