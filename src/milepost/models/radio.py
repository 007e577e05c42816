"""Builds C-RADIO, the vision tower of Nemotron's multimodal models, and its projector."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.mergers import SquaredMerger
from milepost.layers.parameters import ModuleScope, module_list
from milepost.layers.tower import Tower, TowerModules
from milepost.layers.tower_parts import LayerNorm, TowerBlock, TowerLinear, TowerNames, TowerShapes
from milepost.layers.weight_slots import WeightSlot, WeightSlots
from milepost.models.towers import refuse, shapes_of, size_of

_SIZES = "num_hidden_layers", "hidden_size", "num_attention_heads", "patch_size", "num_channels"
_PUBLISHED = TowerNames(
    embedding="radio_model.model.patch_generator.embedder",
    positions="radio_model.model.patch_generator.pos_embed",
    has_batch=True,
    prefix="radio_model.model.patch_generator.cls_token.token",
    block="radio_model.model.blocks.{index}",
    feed_forward=("mlp.fc1", "mlp.fc2"),
)
_CONVERTED = TowerNames(
    embedding="embeddings.patch_projection",
    positions="embeddings.position_embedding",
    has_batch=True,
    prefix="embeddings.cls_register_token",
    block="encoder.layer.{index}",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    feed_forward=("mlp.fc1", "mlp.fc2"),
)
"""Names that transformers has for these tensors."""
_PROJECTORS = (
    ("mlp1", ("0", "1", "3")),
    (
        "multi_modal_projector",
        ("layer_norm", "linear_1", "linear_2"),
    ),
)
"""Path and names of the projector: published, and transformers'."""
_FINAL_NORM = "vision_final_layernorm"
_NUM_FRAMES = 2
"""Frames of a patch of videos."""
_MOVING = {
    _PUBLISHED.embedding: "radio_model.model.patch_generator.video_embedder",
    _CONVERTED.embedding: "embeddings.video_patch_projection",
}
"""Path of the embedding of pictures -> that of videos."""


def radio_tower(whole: PreTrainedConfig, scope: ModuleScope) -> Tower:
    """Builds the tower of a whole configuration. Raises UnsupportedModelError, naming the
    setting."""
    shapes, root = _shapes(whole), scope.root()
    names = _CONVERTED if scope.has(f"{_CONVERTED.embedding}.weight") else _PUBLISHED
    path, projector = _PROJECTORS[root.has(f"{_PROJECTORS[1][0]}.linear_1.weight")]
    norm = None
    if getattr(whole.get_text_config(), "num_nextn_predict_layers", 0):
        stored = root.has(f"{_FINAL_NORM}.weight")
        norm_type = LayerNorm if stored else PlainNorm
        norm = norm_type(shapes.hidden_size, shapes.eps, root.under(_FINAL_NORM))
    blocks = [scope.under(names.block.format(index=index)) for index in range(shapes.depth)]
    modules = TowerModules(
        embedding=RadioEmbedding(
            shapes, scope, names, _NUM_FRAMES if has_video_patches(whole.vision_config) else 1
        ),
        blocks=module_list(TowerBlock(shapes, names, each) for each in blocks),
        merger=SquaredMerger(shapes, projector, root.under(path), norm),
    )
    tower = Tower(shapes, scope, names, modules=modules)
    tower.add_module("scales", UnitScales(shapes.hidden_size, blocks))
    return tower


def _shapes(whole: PreTrainedConfig) -> TowerShapes:
    config = whole.vision_config
    refuse(config, "model_type", config.model_type != "radio", "radio")
    for name, value in (
        ("hidden_act", "gelu"),
        ("use_swiglu_ffn", False),
        ("qkv_bias", True),
    ):
        refuse(config, name, getattr(config, name, None) != value, repr(value))
    hidden_size, ratio = size_of(config, "hidden_size", 2**16), config.mlp_ratio
    is_fit = isinstance(ratio, int | float) and 0 < ratio * hidden_size <= 2**18
    refuse(config, "mlp_ratio", not is_fit, "a number above 0")
    refuse(whole, "downsample_ratio", whole.downsample_ratio != 0.5, "0.5")
    is_other = whole.vision_hidden_size != hidden_size
    refuse(whole, "vision_hidden_size", is_other, f"the tower's hidden_size={hidden_size}")
    num_rows = size_of(config, "max_img_size", 2**14) // size_of(config, "patch_size", 256)
    names = "num_cls_tokens", "num_registers"
    return shapes_of(
        whole,
        _SIZES,
        feed_forward_size=int(hidden_size * ratio),
        merge_size=2,
        num_positions=num_rows**2,
        eps=config.layer_norm_eps,
        merger_size=size_of(whole, "projector_hidden_size", 2**18),
        table_fit="cropped",
        gelu="none",
        num_prefix=sum(size_of(config, name, 1024) for name in names),
        reads_floats=True,
    )


def has_video_patches(config: PreTrainedConfig) -> bool:
    """Whether a tower has an embedding for pairs of frames. Raises UnsupportedModelError for other
    groups."""
    num_frames = getattr(config, "video_temporal_patch_size", None)
    refuse(config, "video_temporal_patch_size", num_frames not in (None, _NUM_FRAMES), "2 or none")
    return num_frames is not None


class RadioEmbedding(nn.Module):
    """Embeds patches of pictures, and those of several frames by a projection of their own."""

    def __init__(
        self, shapes: TowerShapes, scope: ModuleScope, names: TowerNames, num_frames: int
    ) -> None:
        super().__init__()
        size, path = shapes.hidden_size, scope.under(names.embedding)
        self._num_inputs = shapes.num_inputs
        self.still = TowerLinear(path, size, shapes.num_inputs, has_bias=False)
        self.moving = None
        if num_frames > 1:
            path = scope.under(_MOVING[names.embedding])
            # Checkpoints have inputs by frame and then by channel, patches the other way round.
            patch = shapes.num_channels, num_frames, shapes.patch_size**2
            self.moving = TowerLinear(path, size, *patch, has_bias=False, stored=(0, 2, 1, 3))

    def forward(self, values: Tensor, *, is_fixed: bool) -> Tensor:
        """Multiplies the values [P, I] of pictures that have one frame each, or several."""
        if values.shape[1] == self._num_inputs or self.moving is None:
            embedded: Tensor = self.still(values, is_fixed=is_fixed)
        else:
            embedded = self.moving(values, is_fixed=is_fixed)
        return embedded


class PlainNorm(LayerNorm):
    """A norm without a weight and a bias, which checkpoints do not hold."""

    def __init__(self, size: int, eps: float, scope: ModuleScope) -> None:
        super().__init__(size, eps, scope)
        self.weight.fill_(1)
        self.bias.zero_()

    def placements(self) -> WeightSlots:
        return {}


class UnitScales(nn.Module):
    """Scales of a layer's outputs, which checkpoints hold and which are all one. Loading others
    raises UnsupportedModelError."""

    def __init__(self, size: int, blocks: list[ModuleScope]) -> None:
        super().__init__()
        names = ("layer_scale1.lambda1", "layer_scale2.lambda1")
        self._names = [each.full(name) for each in blocks for name in names if each.has(name)]
        self._size = size

    def placements(self) -> WeightSlots:
        return {name: WeightSlot((self._size,), _check_ones) for name in self._names}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Does nothing: there are no parameters."""


def _check_ones(values: Tensor) -> None:
    if not torch.equal(values, torch.ones_like(values)):
        raise UnsupportedModelError("layer_scale1 or layer_scale2 with values other than 1")
