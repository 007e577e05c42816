"""Rotary embedding of the first dimensions of each head; the rest is not rotated.

Angles are float32 in every model, as in training; a float64 model gets the cosines of the float32
angles.

Legend: T tokens, O rotated dimensions of a head (even).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from milepost.errors import UnsupportedModelError
from milepost.kernels import rows
from milepost.layers.context import PictureRows
from milepost.layers.positions import stretched

_SCALED_TYPES = ("linear", "llama3", "yarn", "dynamic", "longrope")
"""RoPE types with scaling. As published, `dynamic` and `longrope` change the angles with the
prompt's length, so cached keys would depend on the request that computed them. Here, as in vLLM,
the angles are those of the longest prompt that the model is run for."""


class Rotary:
    """A model's rotary frequencies, from its configuration; those of one of its layer types, if
    `rope_parameters` has settings for each. Raises UnsupportedModelError for types not listed
    above."""

    def __init__(
        self, config: PreTrainedConfig, device: torch.device, layer_type: str | None = None
    ) -> None:
        if layer_type is None:
            frequencies, self.scale = _frequencies(config)
        else:
            frequencies, self.scale = _frequencies_of(config, layer_type)
        self.frequencies = frequencies.to(device=device, dtype=torch.float32)
        self._num_positions = num_positions(config)
        self._sections = _sections(config)
        self._table: Tensor | None = None

    @property
    def has_rows(self) -> bool:
        """Whether some frequencies are turned by the row, or the column, of a picture's token."""
        return bool(self._sections)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [T, 1, O / 2] of `positions` [T]. A model always asks for the
        same dtype.

        On a GPU they are looked up in a table, which takes one launch instead of seven.
        """
        return (self.look_up if positions.is_cuda else self._compute)(positions, dtype)

    def look_up(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes `angles` from a table of all positions, which the first call builds."""
        if self._table is None:
            every = torch.arange(self._num_positions, device=positions.device)
            self._table = torch.cat(self._compute(every, dtype), 2)[:, 0]
        cosines, sines = rows.take(self._table, positions)[:, None].tensor_split(2, 2)
        return cosines, sines

    def turn_pictures(self, angles: tuple[Tensor, Tensor], pictures: PictureRows) -> None:
        """Replaces those of the step's `angles` that turn by the row or the column of a picture."""
        for positions, section in zip(pictures.positions, self._sections, strict=False):
            turned = self.angles(positions, angles[0].dtype)
            for every, values in zip(angles, turned, strict=True):
                every[pictures.tokens, 0, section] = values[:, 0, section]

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None].float() * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def run_up_to(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Makes a `longrope` model use its short factors if no more than its original length is asked
    for; changes the configuration."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope" or max_model_len is None:
        return
    original = parameters["original_max_position_embeddings"]
    if max_model_len <= original:
        # The factor of the cosines stays that of the whole model.
        parameters.setdefault("factor", config.max_position_embeddings / original)
        config.max_position_embeddings = original


def num_positions(config: PreTrainedConfig) -> int:
    """Returns the number of positions that the model supports."""
    return stretched(getattr(config, "rope_parameters", None) or {}, config.max_position_embeddings)


def _sections(config: PreTrainedConfig) -> tuple[slice, ...]:
    """Returns the frequencies turned by a picture's row, and those turned by its column; the others
    are turned by its time. They alternate, time, row, column, until one of them has its number in
    `mrope_section` (Qwen3-VL, arXiv:2511.21631, section 2.1)."""
    counts = (config.rope_parameters or {}).get("mrope_section") or ()
    return tuple(slice(first, 3 * count, 3) for first, count in enumerate(counts) if first)


def _frequencies_of(config: PreTrainedConfig, layer_type: str) -> tuple[Tensor, float]:
    """Returns the frequencies and the cosine factor of one layer type. A `proportional` type
    rotates the first dimensions of each half of a head, with frequencies counted as if it rotated
    all."""
    parameters = (config.rope_parameters or {}).get(layer_type)
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise UnsupportedModelError(f"rope_parameters.{layer_type} has no rope_theta")
    rope_type = parameters.get("rope_type", "default")
    share = parameters.get("partial_rotary_factor", 1.0)
    if rope_type not in ("default", "proportional") or (rope_type == "default" and share != 1):
        raise UnsupportedModelError(
            f"rope_parameters.{layer_type} with rope_type={rope_type!r} and "
            f"partial_rotary_factor={share} is not supported; supported are default, of whole "
            "heads, and proportional"
        )
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    frequencies[int(share * config.head_dim // 2) :] = 0
    return frequencies / parameters.get("factor", 1.0), 1.0


def _frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type in _SCALED_TYPES:
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), num_positions(config))
    if rope_type != "default":
        raise UnsupportedModelError(
            f"rope_type={rope_type!r} is not supported; supported are default, "
            f"{', '.join(_SCALED_TYPES)}"
        )
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0
