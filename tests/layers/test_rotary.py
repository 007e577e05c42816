"""Rotary positions against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from milepost.errors import UnsupportedModelError
from milepost.kernels.attention.reference import turn
from milepost.layers.rotary import Rotary, num_positions, run_up_to

THETA = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 256}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", **SCALED},
    "llama3": {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **SCALED,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(16)],
        "long_factor": [1.0 + 0.3 * i for i in range(16)],
        **SCALED,
    },
}
POSITIONS = torch.tensor([0, 1, 2, 77, 1023])
CPU = torch.device("cpu")


def sizes(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "hidden_size": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": THETA | parameters,
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_turn_matches_transformers(name: str) -> None:
    config = Qwen3NextConfig(**sizes(PARAMETERS[name]))
    heads = torch.randn(len(POSITIONS), 3, 64, generator=torch.Generator().manual_seed(0))
    theirs = Qwen3NextRotaryEmbedding(config)
    # Of some types angles depend on how long the prompt is: ours are those of the longest.
    theirs(heads, torch.tensor([[num_positions(config) - 1]]))
    cosines, sines = theirs(heads, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cosines, sines, unsqueeze_dim=2)
    turned = turn(heads, *Rotary(config, CPU).angles(POSITIONS, torch.float32))
    torch.testing.assert_close(turned, expected[0], rtol=0, atol=1e-6)
    assert not torch.equal(turned[1:, :, :32], heads[1:, :, :32])
    assert torch.equal(turned[:, :, 32:], heads[:, :, 32:])


def test_text_in_a_multimodal_model_turns_plainly() -> None:
    """Text has the same position in all three grids, so their interleaving changes nothing."""
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_type": "default"}
    config = Qwen3_5TextConfig(**sizes(sections))
    cosines, sines = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), POSITIONS.expand(3, 1, -1))
    ours = Rotary(config, CPU).angles(POSITIONS, torch.float32)
    assert torch.equal(ours[0][:, 0], cosines[0, :, :16])
    assert torch.equal(ours[1][:, 0], sines[0, :, :16])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("default", 1024), ("linear", 4096), ("yarn", 1024), ("llama3", 1024)),
        *(("dynamic", 4096), ("longrope", 1024)),
    ],
)
def test_scaling_says_how_far_positions_reach(name: str, expected: int) -> None:
    assert num_positions(Qwen3NextConfig(**sizes(PARAMETERS[name]))) == expected


def test_yarn_stretches_the_original_length_whatever_the_configured_maximum() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert num_positions(Qwen3NextConfig(**sizes(yarn))) == 4096
    yarn["original_max_position_embeddings"] = 700
    assert num_positions(Qwen3NextConfig(**sizes(yarn))) == 2800


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_table_holds_every_position(name: str) -> None:
    rotary = Rotary(Qwen3NextConfig(**sizes(PARAMETERS[name])), CPU)
    last = rotary._num_positions - 1
    positions = torch.tensor([0, 1, 77, last - 1, last])
    for looked_up, computed in zip(
        rotary.look_up(positions, torch.float32),
        rotary.angles(positions, torch.float32),
        strict=True,
    ):
        assert torch.equal(looked_up, computed)
    with pytest.raises(IndexError):
        rotary.look_up(torch.tensor([last + 1]), torch.float32)


FAR = torch.tensor([262_143, 262_144, 500_000, 1_000_000, 1_048_575])


@pytest.mark.parametrize("name", ["linear", "yarn", "dynamic", "longrope"])
def test_positions_past_the_configured_maximum_match_transformers(name: str) -> None:
    """A million of them, of a model that was trained on 262,144."""
    stretched = name == "longrope"
    own = 1_048_576 if stretched else 262_144
    parameters = PARAMETERS[name] | {"original_max_position_embeddings": 262_144}
    if name in ("linear", "dynamic"):
        del parameters["original_max_position_embeddings"]
    config = Qwen3NextConfig(**sizes(parameters) | {"max_position_embeddings": own})
    rotary = Rotary(config, CPU)
    assert num_positions(config) == 1_048_576
    cosines, sines = Qwen3NextRotaryEmbedding(config)(torch.zeros(1), FAR[None])
    ours = rotary.angles(FAR, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cosines[0, :, :16], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1][:, 0], sines[0, :, :16], rtol=0, atol=1e-6)


def test_longrope_that_is_run_for_no_more_than_its_original_length_uses_short_factors() -> None:
    config, whole = (Qwen3NextConfig(**sizes(PARAMETERS["longrope"])) for _ in range(2))
    expected = Qwen3NextRotaryEmbedding(whole)
    run_up_to(config, 256)
    rotary = Rotary(config, CPU)
    assert num_positions(config) == 256
    torch.testing.assert_close(rotary.frequencies, expected.inv_freq)
    assert rotary.scale == Rotary(whole, CPU).scale > 1
    assert not torch.equal(rotary.frequencies, Rotary(whole, CPU).frequencies)
    longer = Qwen3NextConfig(**sizes(PARAMETERS["longrope"]))
    run_up_to(longer, 257)
    assert num_positions(longer) == 1024


def test_types_that_are_not_known_are_refused() -> None:
    config = Qwen3NextConfig(**sizes({"rope_type": "default"}))
    config.rope_parameters["rope_type"] = "proportional"
    with pytest.raises(UnsupportedModelError, match="proportional"):
        Rotary(config, CPU)
