"""Rotary positions on the first part of each head; the rest passes unturned.

Angles are float32 in every model, as they are in training; a float64 model gets the float32 angles'
cosines.

Legend: T tokens, O turned dimensions of a head (even).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from milepost.errors import UnsupportedModelError
from milepost.kernels import rows

_SCALED_TYPES = ("linear", "llama3", "yarn", "dynamic", "longrope")
"""As they were published, `dynamic` and `longrope` turn a prompt by other angles the longer it is,
so that cached keys would depend on the request that computed them. Here, as in vLLM, angles are
those of the longest prompt that the model is run for."""


class Rotary:
    """Frequencies of a model, from its configuration; raises UnsupportedModelError for types not
    listed above."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        frequencies, self.scale = _frequencies(config)
        self.frequencies = frequencies.to(device=device, dtype=torch.float32)
        self._num_positions = num_positions(config)
        self._table: Tensor | None = None

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, O / 2] of `positions` [T]; of one dtype for a model.

        On a GPU they are looked up, in one launch in place of seven.
        """
        return (self.look_up if positions.is_cuda else self._compute)(positions, dtype)

    def look_up(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`angles` from a table of every position, made by the first call."""
        if self._table is None:
            every = torch.arange(self._num_positions, device=positions.device)
            self._table = torch.cat(self._compute(every, dtype), 2)[:, 0]
        return rows.take(self._table, positions)[:, None].tensor_split(2, 2)

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None].float() * self.frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def run_up_to(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Have a `longrope` model that is asked for no more than its original length turn by its short
    factors; changes the configuration."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope" or max_model_len is None:
        return
    original = parameters["original_max_position_embeddings"]
    if max_model_len <= original:
        # What cosines are multiplied by stays that of the whole model.
        parameters.setdefault("factor", config.max_position_embeddings / original)
        config.max_position_embeddings = original


def num_positions(config: PreTrainedConfig) -> int:
    """Positions that a model can be asked for: as many as it was trained on, or as many as its
    scaling stretches these to.

    YaRN stretches the original length by its factor (arXiv:2309.00071, section 3.1), whatever
    `max_position_embeddings` says; linear and dynamic scaling stretch that; llama3 and longrope
    (arXiv:2402.13753) name the stretched one.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    own: int = config.max_position_embeddings
    match parameters.get("rope_type", "default"):
        case "yarn":
            return int(parameters["original_max_position_embeddings"] * parameters["factor"])
        case "linear" | "dynamic":
            return int(own * parameters["factor"])
        case _:
            return own


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
