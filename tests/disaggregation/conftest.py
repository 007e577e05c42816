"""Tiny checkpoints, and the transports that there are on this machine."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.engines import save_tiny

SMALL = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


DIVIDES = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""By two ranks."""


def save_small(folder, **changes):
    return save_tiny(folder, "qwen3_next", torch.float64, **(SMALL | changes))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_small(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="session")
def tiny_of_two(tmp_path_factory):
    """That two ranks can share."""
    return save_small(tmp_path_factory.mktemp("ranks"), **DIVIDES)


@pytest.fixture(params=["socket", "nixl"])
def transport(request):
    if request.param == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    return request.param
