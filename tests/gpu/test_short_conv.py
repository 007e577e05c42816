"""The fused kernels of short convolutions beside pages on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels.short_conv_cases import STEPS, check, check_decodes, play

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("num_taps", "has_bias"), [(2, False), (3, True), (7, False)])
@pytest.mark.parametrize("name", STEPS)
def test_it_matches_the_reference(name: str, num_taps: int, has_bias: bool) -> None:
    check(name, num_taps, has_bias, probe(torch.device("cuda", 0)), "cuda")


@pytest.mark.parametrize(("num_taps", "has_bias"), [(3, True), (7, False)])
def test_decodes_take_one_launch(num_taps: int, has_bias: bool) -> None:
    check_decodes(num_taps, has_bias, probe(torch.device("cuda", 0)), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_however_tokens_fall_into_drafts_states_are_those_of_one_at_a_time(dtype) -> None:
    for seed in range(4):
        play(3, seed, dtype, probe(torch.device("cuda", 0)), "cuda")
