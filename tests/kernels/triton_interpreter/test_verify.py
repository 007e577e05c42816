"""Fused steps that verify, interpreted: bit for bit the fused kernels of decoding."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels import kimi, ssd
from tests.kernels.mixers import MixerShapes, Shapes, make_projected
from tests.kernels.verifying import Kind, Mixer, Plain, is_equal, play
from tests.numbers import relative_error

CHIP = probe(torch.device("cpu"))
SHAPES: Mapping[str, MixerShapes] = {
    "gated_delta": Shapes(key_heads=1, value_heads=2, key_dim=8, value_dim=5, taps=3),
    "kda": kimi.Shapes(heads=1, head_dim=36, taps=3),
    "kda with a bound": kimi.Shapes(heads=2, head_dim=12, taps=3, least_decay=-5.0),
    "mamba2": ssd.Shapes(heads=2, head_dim=5, groups=1, state_size=6),
}
"""Several programs share what a head or a group has."""


@pytest.fixture(params=SHAPES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(shapes=SHAPES[request.param], dtype=torch.float32, chip=CHIP, num_tokens=3)


def test_any_split_gives_the_states_of_one_token_at_a_time(kind: Kind) -> None:
    """Which the pool rounds."""
    play(Plain(replace(kind, dtype=torch.float16, state_dtype=torch.float16)), random.Random(3))


def test_it_matches_the_reference_beside_a_prefill_and_padding(kind: Kind) -> None:
    ours, theirs = Mixer(kind), Mixer(replace(kind, chip=None))
    tokens, prompt = make_projected(kind.shapes, 9), make_projected(kind.shapes, 20, seed=5)
    steps = [
        {0: (0, tokens[:3]), 1: (0, tokens[3:4])},
        {0: (2, tokens[4:9]), 1: (0, tokens[:2]), 2: (0, tokens[:1])},
        {0: (1, tokens[:0]), 1: (1, tokens[:1])},
    ]
    for padding, parts in enumerate(steps):
        beside = prompt if padding == 1 else None
        expected = theirs.step(parts, beside)
        assert relative_error(ours.step(parts, beside, padding=padding), expected) < 5e-6
    for sequence in range(4):
        for found, wanted in zip(ours.state(sequence), theirs.state(sequence), strict=True):
            assert relative_error(found, wanted) < 5e-6
    assert torch.equal(ours.records.nan_to_num(9), theirs.records.nan_to_num(9))


def test_a_prefill_beside_verifying_sequences_has_the_bits_that_it_has_alone(kind: Kind) -> None:
    beside, alone = Mixer(kind), Mixer(kind)
    tokens, prompt = make_projected(kind.shapes, 4), make_projected(kind.shapes, 20, seed=5)
    output = beside.step({0: (0, tokens[:3]), 2: (0, tokens[3:])}, prompt, padding=3)
    assert torch.equal(output[4:], alone.step({}, prompt, verifies=False))
    assert is_equal(beside.state(3), alone.state(3))
