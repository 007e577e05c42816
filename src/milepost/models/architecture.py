"""What a file of `architectures` declares, and what configurations have in common."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.attention import AttentionShapes
from milepost.layers.gated_delta import GatedDeltaShapes
from milepost.layers.mamba2 import Mamba2Shapes
from milepost.layers.mtp import MTPHead
from milepost.layers.parameters import ParameterKind
from milepost.layers.parts import Layer
from milepost.layers.rotary import Rotary
from milepost.models.decoder import Decoder, DecoderParts

HEAD = "mtp"
"""What a head's tensors stand under, at the top of multimodal checkpoints too."""

Requirement = tuple[Callable[[Any], bool], str]
"""Which values of a setting are run, and which these are in words."""


def is_unset(value: Any) -> bool:
    """A setting that is missing, or says no."""
    return not value


def is_true_or_unset(value: Any) -> bool:
    """A setting that is missing, or says yes."""
    return value in (None, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of models. A file's `ARCHITECTURES` are all that there is to registering them."""

    model_types: tuple[str, ...]
    """`model_type` of the configurations, and of the text part of multimodal ones."""
    build: Callable[[PreTrainedConfig, ParameterKind], DecoderParts]
    """The layers of a text configuration, whose tensors stand under `kind.path`."""
    layer_types: tuple[str, ...] = ("full_attention", "linear_attention")
    """Kinds of layers in configurations that `build` knows."""
    requirements: Mapping[str, Requirement] = field(default_factory=dict)
    """Settings besides those that are checked for every model (see `registry`)."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of settings -> that of the configuration class; `a.b` stands in the object a."""
    spellings: tuple[tuple[str, ...], ...] = ()
    """Names of settings that say the same in ways that differ: an override of one stands in place
    of all."""
    settle: Callable[[dict[str, Any]], None] | None = None
    """Brings those in the settings of a text part to the configuration class's, in place; raises
    ConfigError where they contradict each other."""
    prefixes: tuple[str, ...] = ("model.language_model", "model")
    """Where the text model may stand in a checkpoint; the first whose embedding is there."""
    embedding: str = "embed_tokens"
    head: Callable[[PreTrainedConfig, ParameterKind, Rotary], MTPHead] | None = None
    """The head of such a configuration, whose tensors stand under `kind.path`; its positions are
    the model's."""
    skipped: tuple[str, ...] = (r"model\.visual\.",)
    """Patterns of tensors that are left out knowingly, matched at the beginning: the vision tower
    of a multimodal checkpoint. So is the head where none is asked for."""

    def decoder(
        self,
        config: PreTrainedConfig,
        kind: ParameterKind,
        *,
        is_tied: bool,
        has_head: bool = False,
    ) -> Decoder:
        """An unfilled model; `kind` is that of the whole checkpoint."""
        own = kind.under(self._prefix(kind.names))
        parts = self.build(config, own)
        if has_head:
            parts = replace(parts, head=self.head_of(config, kind, rotary_of(parts.layers)))
        return Decoder(config, parts, own, is_tied=is_tied, embedding=self.embedding)

    def head_of(
        self, config: PreTrainedConfig, kind: ParameterKind, rotary: Rotary | None = None
    ) -> MTPHead:
        """The head alone, unfilled."""
        assert self.head is not None, "only architectures that have heads are asked for one"
        rotary = rotary or Rotary(config, kind.device)
        return self.head(config, kind.root().under(HEAD), rotary)

    def _prefix(self, names: Container[str]) -> str:
        found = (each for each in self.prefixes if f"{each}.{self.embedding}.weight" in names)
        return next(found, self.prefixes[-1])


def rotary_of(layers: Iterable[Layer]) -> Rotary | None:
    """The positions that layers turn by."""
    parts = (part for layer in layers for block in layer.blocks for part in block.parts)
    return next((part.rotary for part in parts if part.rotary is not None), None)


def attention_shapes(config: PreTrainedConfig, **others: Any) -> AttentionShapes:
    """Sizes under the names that most configurations have for them."""
    head_dim = getattr(config, "head_dim", None)
    return AttentionShapes(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        bias=config.attention_bias,
        **others,
    )


def gated_delta_shapes(config: PreTrainedConfig, **others: Any) -> GatedDeltaShapes:
    """Likewise, of Gated DeltaNet layers."""
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
    """Likewise, of Mamba2 layers."""
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


def refuse_uneven(config: PreTrainedConfig, many: str, few: str) -> None:
    """Raise UnsupportedModelError if a number of heads is not a multiple of the other."""
    if getattr(config, many, 0) % getattr(config, few, 1):
        raise UnsupportedModelError(
            f"{many}={getattr(config, many)} is not a multiple of {few}={getattr(config, few)}"
        )
