"""Builds the vision towers of configurations, and refuses settings that they do not run."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower import Tower, TowerShapes

_THETA = 10_000.0
"""Base of the rotary frequencies if a configuration does not name it."""
_MOST: dict[str, int] = {
    "depth": 1024,
    "hidden_size": 2**16,
    "num_heads": 2**10,
    "intermediate_size": 2**18,
    "out_hidden_size": 2**18,
    "patch_size": 256,
    "spatial_merge_size": 16,
    "temporal_patch_size": 16,
    "in_channels": 3,
    "num_position_embeddings": 2**20,
}
"""Setting -> largest value; the smallest is 1."""


def qwen_tower(whole: PreTrainedConfig, kind: ModuleScope) -> Tower:
    """Builds the tower of Qwen3.5 and its successors: Qwen3-VL's without the embeddings that this
    one adds to deep layers. Raises UnsupportedModelError, naming the setting."""
    config = whole.vision_config
    sizes = {name: _size(config, name, most) for name, most in _MOST.items()}
    _refuse(config, "hidden_act", config.hidden_act != "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    indexes = getattr(config, "deepstack_visual_indexes", None)
    _refuse(config, "deepstack_visual_indexes", bool(indexes), "none")
    _refuse(config, "in_channels", sizes["in_channels"] != 3, "3")
    num_heads, hidden_size = sizes["num_heads"], sizes["hidden_size"]
    is_uneven = hidden_size % (4 * num_heads) > 0
    _refuse(config, "num_heads", is_uneven, f"a divisor of hidden_size={hidden_size} / 4")
    count = sizes["num_position_embeddings"]
    _refuse(config, "num_position_embeddings", round(count**0.5) ** 2 != count, "a square")
    text_size = whole.get_text_config().hidden_size
    own = sizes["out_hidden_size"]
    _refuse(config, "out_hidden_size", own != text_size, f"the model's hidden_size={text_size}")
    _check_sections(whole.get_text_config())
    shapes = TowerShapes(
        depth=sizes["depth"],
        hidden_size=hidden_size,
        num_heads=num_heads,
        feed_forward_size=sizes["intermediate_size"],
        output_size=own,
        patch_size=sizes["patch_size"],
        merge_size=sizes["spatial_merge_size"],
        num_frames=sizes["temporal_patch_size"],
        num_channels=sizes["in_channels"],
        num_positions=count,
        theta=_theta(config),
    )
    return Tower(shapes, kind)


def _size(config: PreTrainedConfig, name: str, most: int) -> int:
    """Returns a whole number; two equal ones stand for one."""
    value: Any = getattr(config, name, None)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    is_fit = type(value) is int and 1 <= value <= most
    _refuse(config, name, not is_fit, f"a whole number from 1 to {most}")
    return value


def _theta(config: PreTrainedConfig) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind, theta = parameters.get("rope_type", "axial"), parameters.get("rope_theta", _THETA)
    _refuse(config, "rope_parameters", kind not in ("axial", "default"), "of rope_type axial")
    is_fit = isinstance(theta, int | float) and not isinstance(theta, bool) and 1 <= theta < 1e30
    _refuse(config, "rope_parameters", not is_fit, "with a rope_theta of 1 or more")
    return float(theta)


def _check_sections(text: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError unless the text part's frequencies are shared out among time,
    rows and columns."""
    sections = (text.rope_parameters or {}).get("mrope_section")
    is_list = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_list or not all(type(each) is int and 0 <= each <= 2**14 for each in sections):
        raise UnsupportedModelError(
            f"text_config.rope_parameters.mrope_section={sections!r} is not supported; supported "
            "are three whole numbers"
        )


def _refuse(config: PreTrainedConfig, name: str, is_refused: bool, wanted: str) -> None:
    if is_refused:
        shown = repr(getattr(config, name, None))[:100]
        raise UnsupportedModelError(
            f"vision_config.{name}={shown} is not supported; supported is {wanted}; "
            "language_model_only=True leaves the vision part out"
        )
