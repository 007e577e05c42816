"""Builds the vision towers of configurations, and refuses settings that they do not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from milepost.checks import is_number
from milepost.errors import UnsupportedModelError
from milepost.layers.grid_tower import GridBlock, GridBlockShapes, NormedEmbedding
from milepost.layers.mergers import Merger
from milepost.layers.parameters import ModuleScope, module_list
from milepost.layers.tower import Tower, TowerModules
from milepost.layers.tower_parts import TowerNames, TowerShapes

_THETA = 10_000.0
"""Base of the rotary frequencies if a configuration does not name it."""
_SIZES: dict[str, tuple[str, int]] = {
    "depth": ("depth", 1024),
    "num_hidden_layers": ("depth", 1024),
    "hidden_size": ("hidden_size", 2**16),
    "num_heads": ("num_heads", 2**10),
    "num_attention_heads": ("num_heads", 2**10),
    "intermediate_size": ("feed_forward_size", 2**18),
    "out_hidden_size": ("output_size", 2**18),
    "patch_size": ("patch_size", 256),
    "spatial_merge_size": ("merge_size", 16),
    "temporal_patch_size": ("num_frames", 16),
    "in_channels": ("num_channels", 3),
    "num_channels": ("num_channels", 3),
    "num_position_embeddings": ("num_positions", 2**20),
    "num_patches": ("num_positions", 2**20),
}
"""Maps a setting to the size that it gives and its largest value; the smallest is 1."""
_QWEN = (
    *("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size", "in_channels", "num_position_embeddings"),
)


def qwen_tower(whole: PreTrainedConfig, scope: ModuleScope) -> Tower:
    """Builds the tower of Qwen3.5 and its successors: Qwen3-VL's without the embeddings that this
    one adds to deep layers. Raises UnsupportedModelError, naming the setting."""
    config = whole.vision_config
    refuse(config, "hidden_act", config.hidden_act != "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    indexes = getattr(config, "deepstack_visual_indexes", None)
    refuse(config, "deepstack_visual_indexes", bool(indexes), "none")
    text = whole.get_text_config()
    shapes = shapes_of(whole, _QWEN, theta=_theta(config))
    is_other = shapes.output_size != text.hidden_size
    wanted = f"the model's hidden_size={text.hidden_size}"
    refuse(config, "out_hidden_size", is_other, wanted)
    _check_sections(text)
    return Tower(shapes, scope)


_PROJECTOR = "multi_modal_projector"
_SIGLIP = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("patch_size", "num_channels", "num_patches"),
)
_SIGLIP_NAMES = TowerNames(
    embedding="embeddings.patch_embedding",
    has_channels_last=True,
    positions="embeddings.position_embedding.weight",
    block="encoder.layers.{index}",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    feed_forward=("mlp.fc1", "mlp.fc2"),
    norm="post_layernorm",
    merger=("linear_1", "linear_2"),
)
_SIGLIP_PATHS = tuple(
    f"{outer}vision_tower{inner}" for outer in ("model.", "") for inner in ("", ".vision_model")
)


def siglip_tower(whole: PreTrainedConfig, scope: ModuleScope) -> Tower:
    """Builds the tower of LFM2-VL and LFM2.5-VL: SigLIP2 for pictures of any shape (NaFlex), and a
    projector that merges its patches. Raises UnsupportedModelError, naming the setting."""
    config = whole.vision_config
    refuse(
        config, "model_type", config.model_type != "siglip2_vision_model", "siglip2_vision_model"
    )
    refuse(config, "hidden_act", config.hidden_act != "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    merge_size = size_of(whole, "downsample_factor", 16)
    merger_size = size_of(whole, "projector_hidden_size", 2**18)
    for name, values, wanted in (
        ("projector_hidden_act", ("gelu",), "gelu"),
        ("projector_bias", (True,), "true"),
        ("vision_feature_layer", (None, -1), "-1"),
    ):
        refuse(whole, name, getattr(whole, name, None) not in values, wanted)
    shapes = shapes_of(
        whole,
        _SIGLIP,
        merge_size=merge_size,
        eps=config.layer_norm_eps,
        merger_size=merger_size,
        table_fit="averaged",
    )
    tower, projector = _found(scope, _SIGLIP_PATHS, f"{_SIGLIP_NAMES.norm}.weight")
    merged_norm = "layer_norm" if whole.projector_use_layernorm else None
    return Tower(shapes, tower, replace(_SIGLIP_NAMES, merged_norm=merged_norm), projector)


def _found(
    scope: ModuleScope, paths: Sequence[str], tensor: str
) -> tuple[ModuleScope, ModuleScope]:
    """Returns the path of the tower, the first of these that has the tensor, and of the projector
    beside it."""
    path = next((each for each in paths if f"{each}.{tensor}" in scope.names), paths[0])
    outer, root = path.partition("vision_tower")[0], scope.root()
    return root.under(path), root.under(f"{outer}{_PROJECTOR}")


_GRID = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size", "in_channels"),
)
_GRID_NAMES = TowerNames(norm="layer_norm", merger=("linear_1", "linear_2"))
_MIXERS = ("conv", "full_attention")


def lfm3_tower(whole: PreTrainedConfig, scope: ModuleScope) -> Tower:
    """Builds the tower of LFM3-VL, whose blocks convolve a picture over its grid or attend, and its
    projector. Raises UnsupportedModelError, naming the setting."""
    config = whole.vision_config
    num_kv_heads = size_of(config, "num_key_value_heads", 2**10)
    width = size_of(config, "conv_kernel_size", 255)
    depth = size_of(config, "num_hidden_layers", 1024)
    num_heads = size_of(config, "num_attention_heads", 2**10)
    wanted = f"a divisor of num_attention_heads={num_heads}"
    refuse(config, "num_key_value_heads", num_heads % num_kv_heads > 0, wanted)
    refuse(config, "conv_kernel_size", width % 2 == 0, "an odd number")
    mixers: Any = getattr(config, "layer_types", None)
    is_list = isinstance(mixers, list | tuple) and len(mixers) == depth
    is_known = is_list and all(each in _MIXERS for each in mixers)
    refuse(config, "layer_types", not is_known, f"{depth} of {' and '.join(_MIXERS)}")
    for name, value in (("projector_hidden_act", "gelu"), ("projector_bias", True)):
        refuse(whole, name, getattr(whole, name, None) != value, repr(value))
    shapes = shapes_of(
        whole,
        _GRID,
        theta=_theta(config),
        merger_size=size_of(whole, "projector_hidden_size", 2**18),
        is_gated=True,
        num_attending=sum(each != "conv" for each in mixers),
    )
    block_shapes = GridBlockShapes(num_kv_heads=num_kv_heads, conv_width=width, eps=config.norm_eps)
    paths = ("model.vision_tower", "vision_tower")
    tower, projector = _found(scope, paths, "embedding_norm.weight")
    modules = TowerModules(
        embedding=NormedEmbedding(shapes, block_shapes.eps, tower),
        blocks=module_list(
            GridBlock(shapes, block_shapes, mixer, tower.under(f"layers.{index}"))
            for index, mixer in enumerate(mixers)
        ),
        merger=Merger(shapes, _GRID_NAMES, projector, projector),
    )
    return Tower(shapes, tower, _GRID_NAMES, modules=modules)


def shapes_of(whole: PreTrainedConfig, settings: Iterable[str], **others: Any) -> TowerShapes:
    """Reads these sizes of a vision part, beside which `others` are given. Raises
    UnsupportedModelError, naming the setting, if no tower of this kind has such a size."""
    config = whole.vision_config
    names = {_SIZES[name][0]: name for name in settings}
    read = {field: size_of(config, name, _SIZES[name][1]) for field, name in names.items()}
    by_default = {"output_size": whole.get_text_config().hidden_size, "num_frames": 1}
    by_default |= {"num_positions": 0, "theta": None}
    shapes = TowerShapes(**{**by_default, **read, **others})
    refuse(config, names["num_channels"], shapes.num_channels != 3, "3")
    is_uneven = shapes.hidden_size % (4 * shapes.num_heads) > 0
    wanted = f"a divisor of hidden_size={shapes.hidden_size} / 4"
    refuse(config, names["num_heads"], is_uneven, wanted)
    if name := names.get("num_positions"):
        is_square = round(shapes.num_positions**0.5) ** 2 == shapes.num_positions
        refuse(config, name, not is_square, "a square")
    return shapes


def size_of(config: PreTrainedConfig, name: str, most: int) -> int:
    """Returns a setting that is a whole number, or a list of two equal ones."""
    value: Any = getattr(config, name, None)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    is_fit = type(value) is int and 1 <= value <= most
    refuse(config, name, not is_fit, f"a whole number from 1 to {most}")
    return int(value)


def _theta(config: PreTrainedConfig) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type, theta = parameters.get("rope_type", "axial"), parameters.get("rope_theta", _THETA)
    refuse(config, "rope_parameters", rope_type not in ("axial", "default"), "of rope_type axial")
    is_fit = is_number(theta) and 1 <= theta < 1e30
    refuse(config, "rope_parameters", not is_fit, "with a rope_theta of 1 or more")
    return float(theta)


def _check_sections(text: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError unless the text part's frequencies are shared out among time,
    rows and columns."""
    sections: Any = (text.rope_parameters or {}).get("mrope_section")
    is_list = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_list or not all(type(each) is int and 0 <= each <= 2**14 for each in sections):
        raise UnsupportedModelError(
            f"text_config.rope_parameters.mrope_section={sections!r} is not supported; supported "
            "are three whole numbers"
        )


def refuse(config: PreTrainedConfig, name: str, is_refused: bool, wanted: str) -> None:
    if is_refused:
        shown = repr(getattr(config, name, None))[:100]
        where = "" if getattr(config, "vision_config", None) else "vision_config."
        raise UnsupportedModelError(
            f"{where}{name}={shown} is not supported; supported is {wanted}; "
            "language_model_only=True leaves the vision part out"
        )
