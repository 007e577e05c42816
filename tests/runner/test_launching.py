"""Up to which size of a step its launches are what it takes."""

from __future__ import annotations

import pytest
from tests.checkpoints import build, write

from milepost.kernels.platform.device import Chip
from milepost.models import LoadOptions, load_model
from milepost.runner.measuring import most_launched_tokens

HOPPER = Chip(arch="sm_90", capability=(9, 0), is_amd=False, num_sms=132, shared_bytes=227 << 10)
AMPERE = Chip(arch="sm_80", capability=(8, 0), is_amd=False, num_sms=108, shared_bytes=163 << 10)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_launches_are_weighed_against_products(name, tmp_path):
    """Of the experts, a token is multiplied by those that it takes."""
    write(build(name), name, tmp_path)
    model, _ = load_model(tmp_path, LoadOptions(dtype="float32"))
    weights = 0.0
    for layer in model.layers:
        for called, parameter in layer.named_parameters():
            if ".weights." in called:
                weights += parameter.numel()
        for part in layer.blocks[1].parts:
            if name == "qwen3_next":
                stacks = [each for each in part.experts.parameters() if each.dim() == 3]
                num_taken = part.shapes.num_chosen + part.num_joint
                weights += sum(stack.numel() / len(stack) * num_taken for stack in stacks)
    launched_s = 4 * 0.85e-3
    assert most_launched_tokens(model, HOPPER) == int(launched_s * 132 * 4e12 / (2 * weights))
    assert most_launched_tokens(model, AMPERE) == int(launched_s * 108 * 1.5e12 / (2 * weights))
