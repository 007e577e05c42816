"""The fused kernels of short convolutions beside pages, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels.short_conv_cases import STEPS, check, check_decodes, play


@pytest.mark.parametrize(("num_taps", "has_bias"), [(3, True), (7, False)])
@pytest.mark.parametrize("name", STEPS)
def test_it_matches_the_reference(name: str, num_taps: int, has_bias: bool) -> None:
    check(name, num_taps, has_bias, probe(torch.device("cpu")))


@pytest.mark.parametrize(("num_taps", "has_bias"), [(3, True), (7, False)])
def test_decodes_take_one_launch(num_taps: int, has_bias: bool) -> None:
    check_decodes(num_taps, has_bias, probe(torch.device("cpu")))


@pytest.mark.parametrize("in_slots", [False, True])
def test_however_tokens_fall_into_drafts_states_are_those_of_one_at_a_time(in_slots: bool) -> None:
    play(4, 1, torch.float32, probe(torch.device("cpu")), in_slots=in_slots)
